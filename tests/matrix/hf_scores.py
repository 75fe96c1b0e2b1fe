"""Log-probs of saved samples under a Hugging Face model in float64, one sequence at a time.

hf_scores.py MODEL_DIR SAMPLES_DIR OUT.pt  saves file name -> a tensor of each response's log-probs.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_rl_corr.rollout.sample_file import read_trajectories


def main(model_dir, samples_dir, out):
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()

    @torch.no_grad()
    def scores(trajectory):
        ids = torch.cat([trajectory.prompt_ids, trajectory.output_ids])
        words = model(ids[None]).logits[0, len(trajectory.prompt_ids) - 1 : -1].log_softmax(-1)
        return words.gather(1, trajectory.output_ids[:, None])[:, 0]

    files = sorted(Path(samples_dir).iterdir())
    torch.save(
        {path.name: [scores(one.trajectory) for one in read_trajectories(path)] for path in files}, out
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
