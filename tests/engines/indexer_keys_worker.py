"""What SGLang's own code makes of index scores on their way into an answer, on CPU tensors.

indexer_keys_worker.py OUT.pt  saves the scores, the field as the detokenizer writes it, and the keys that the
selection took. The steps are a server's: two requests share a prefill, then each is decoded alone.
"""

import sys
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.state_capturer import base, indexer_topk

LAYERS, K, PROMPT, TOKENS, SLOTS = 3, 4, 6, 12, 64


def plain(size, dtype, **_):
    """Host memory that is not pinned, which needs a GPU."""
    return torch.zeros(size, dtype=dtype)


def main(out):
    generator = torch.Generator().manual_seed(0)
    one = SimpleNamespace(attn_tp_size=1, chunked_prefill_size=32)
    with (
        mock.patch.object(indexer_topk, "get_parallel", lambda: one),
        mock.patch.object(indexer_topk, "get_schedule", lambda: one),
        mock.patch.dict(base.ALLOC_MEMORY_FUNCS, {"cpu": plain}),
    ):
        capturer = indexer_topk._create_indexer_capturer_raw(
            enable=True,
            num_indexer_layers=LAYERS,
            index_topk=K,
            num_tokens=SLOTS,
            max_running_requests=8,
            device="cpu",
        )
    slots = torch.randperm(SLOTS, generator=generator)[: 2 * TOKENS].view(2, TOKENS)
    scores = torch.randn(2, LAYERS, TOKENS, TOKENS, generator=generator)
    choose = DSATopKBackend("torch").topk_transform

    def run(rows):
        """One forward pass over (request, token) pairs, whose keys lie one request behind the other."""
        for layer in range(LAYERS):
            wide = torch.full((len(rows), 2 * TOKENS), 9.0)
            for at, (request, token) in enumerate(rows):
                wide[at, request * TOKENS : (request + 1) * TOKENS] = scores[request, layer, token]
            starts = torch.tensor([request * TOKENS for request, _ in rows])
            taken = choose(
                wide,
                torch.tensor([token + 1 for _, token in rows]),
                K,
                TopkTransformMethod.RAGGED,
                None,
                row_starts=starts,
            )
            capturer.capture(layer, taken)
        cache = torch.tensor([int(slots[request, token]) for request, token in rows])
        batch = SimpleNamespace(out_cache_loc=cache, out_cache_loc_virtual=None)
        capturer.on_forward_end(batch, False, None)

    with envs.SGLANG_DSA_FUSE_TOPK.override(False):
        run([(request, token) for request in range(2) for token in range(PROMPT)])
        for token in range(PROMPT, TOKENS - 1):
            run([(1, token), (0, token)])
    pool = SimpleNamespace(req_to_token=slots)
    found = [capturer.get_topk(request, TOKENS, pool) for request in range(2)]
    fields = DetokenizerManager._b64_encode_per_request(found)
    torch.save({"scores": scores, "fields": fields, "slots": slots}, out)


if __name__ == "__main__":
    main(sys.argv[1])
