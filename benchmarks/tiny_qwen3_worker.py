"""Makes a tiny Qwen3, dense or with experts, and its tokenizer: tiny_qwen3_worker.py OUT_DIR dense|moe"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/quickstart"))

from make_model import make_model, make_tokenizer, model_config


def main(out: str, kind: str) -> None:
    if kind == "moe":
        make_model(Path(out), seed=0)
        return
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    own = Qwen3Config().to_dict()
    given = {
        name: value
        for name, value in model_config().to_dict().items()
        if name in own and name != "layer_types"
    }
    for name in ("model_type", "architectures", "transformers_version"):
        given.pop(name, None)
    Qwen3ForCausalLM(Qwen3Config(**given)).to(torch.float32).save_pretrained(out)
    make_tokenizer().save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
