"""Print each replaced function, and why it is replaced where there is no GPU: python -m tools.cpu"""

import argparse
from itertools import groupby

from tools.cpu.process_environment import ENGINES, VARIABLE, gpu_available, replacements


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.cpu", description=__doc__)
    parser.add_argument("engine", nargs="*", help=f"which to list: {', '.join(ENGINES)} (default: all)")
    engines = parser.parse_args().engine or ENGINES
    for engine in engines:
        print(f"\n{VARIABLE}={engine}" + ("  (inert here: there is a GPU)" if gpu_available() else ""))
        for why, group in groupby(replacements(engine), key=lambda row: row[1]):
            print(f"\n  {why}:")
            for target, _ in group:
                print(f"    {target}")


if __name__ == "__main__":
    main()
