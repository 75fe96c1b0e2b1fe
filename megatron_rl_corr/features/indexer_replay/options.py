"""The flag of the replay of keys."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl_corr.config.fields import Options


@dataclass(frozen=True, kw_only=True)
class IndexerReplayConfig(Options):
    """Indexer replay: whose choice of keys trains sparse attention (DSA)."""

    indexer_replay: bool = False
    """Every pass of the trained model takes the keys that the servers' sparse attention took, of each token
    that has more of them than --dsa-indexer-topk. SGLang alone: start servers with
    --enable-return-indexer-topk, and with SGLANG_DSA_FUSE_TOPK=0 in their environment. An answer has 4 bytes
    for each token, layer and key: 500 kB a token of DeepSeek-V3.2.
    """

    def check_replayed(self) -> None:
        """ValueError where samples come from files, which have no keys."""
        if self.indexer_replay and self.replay is not None:
            raise ValueError(
                "`indexer_replay` needs servers: files of samples, which `replay` reads, have no keys; drop "
                "one of them"
            )


OPTIONS = IndexerReplayConfig
