"""In the place of a training: logs the steps of a file, and ends with a status.

fake_run.py STEPS.json STATUS ... --rollout-log-dir DIR ...
"""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--rollout-log-dir") + 1])
folder.mkdir(parents=True)
with (folder / "metrics.jsonl").open("w") as file:
    for row in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(row), file=file)
        print("a step")
sys.exit(int(sys.argv[2]))
