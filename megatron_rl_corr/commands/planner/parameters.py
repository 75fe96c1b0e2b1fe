"""How many parameters a model has, by how Megatron's ranks share them, from config.json alone.

h hidden size, q numbers of all query heads, kv of all key heads, f width of an MLP, E experts, K routed
per token, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_rl_corr.models import architectures as parts
from megatron_rl_corr.models.architectures import Config


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of a layer, or of a part of one.

    Example: a layer of Qwen3-30B-A3B is `LayerParameters(split=18874368, whole=266496, routed=603979776)`.
    """

    split: int = 0
    """Over tensor-parallel ranks: attention's heads, an MLP's width."""
    whole: int = 0
    """On every rank: norms, the router, low-rank projections of latent attention."""
    routed: int = 0
    """Parameters of all routed experts, over expert-parallel and expert-tensor-parallel ranks."""

    def __add__(self, other: LayerParameters) -> LayerParameters:
        return LayerParameters(self.split + other.split, self.whole + other.whole, self.routed + other.routed)

    @property
    def total(self) -> int:
        return self.split + self.whole + self.routed


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of a model: of each layer, of the embedding and of the rest."""

    layers: tuple[LayerParameters, ...]
    embedding: int
    """V h, without Megatron's padding of V."""
    tied: bool
    """The output layer has no weights of its own."""
    final_norm: int
    active_share: float = field(default=0.0)
    """K / E: the share of the routed parameters that a token uses."""

    @property
    def ends(self) -> int:
        """Embedding and output layer."""
        return self.embedding * (1 if self.tied else 2)

    @property
    def routed(self) -> int:
        """Parameters of the routed experts of all layers."""
        return sum(layer.routed for layer in self.layers)

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers) + self.final_norm + self.ends

    @property
    def active(self) -> int:
        """Those that compute one token: all, but K of each layer's E experts."""
        return self.total - self.routed + round(self.routed * self.active_share)


def model_parameters(config: Config) -> ModelParameters:
    """Count the parameters of the model that config.json describes, which has all settings (`read_model`).

    Raises:
        ValueError: its architecture is none of `models.architectures.FAMILIES`.
    """
    own = parts.parts_of(config)
    with_experts, hidden = parts.expert_layers(config), config["hidden_size"]
    linear, layers = parts.linear_layers(config), []
    for number in range(config["num_hidden_layers"]):
        # A layer has experts or a dense MLP, a delta net or attention; all other parts are in every layer.
        left_out = {parts.dense_mlp} if number in with_experts else ONLY_WITH_EXPERTS
        left_out = left_out | (OF_ATTENTION if number in linear else OF_DELTA_NETS)
        counted = [PARTS[part](config) for part in own if part not in left_out]
        layers.append(sum(counted, start=LayerParameters()))
    experts = parts.num_experts(config)
    return ModelParameters(
        layers=tuple(layers),
        embedding=config["vocab_size"] * hidden,
        tied=parts.is_tied(config),
        final_norm=hidden,
        active_share=config["num_experts_per_tok"] / experts if with_experts else 0.0,
    )


def query_size(config: Config) -> int:
    """q: numbers of all query heads of a token, without latent attention."""
    return config["num_attention_heads"] * head_size(config)


def key_size(config: Config) -> int:
    """kv: numbers of all key heads of a token, and of all value heads, without latent attention."""
    return (config.get("num_key_value_heads") or config["num_attention_heads"]) * head_size(config)


def head_size(config: Config) -> int:
    """Numbers of one head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def expert_size(config: Config) -> int:
    """f of one routed expert."""
    return config.get("moe_intermediate_size") or config["intermediate_size"]


def shared_size(config: Config) -> int:
    """f of a layer's shared experts together; 0 without."""
    own = parts.parts_of(config)
    if parts.gated_shared_expert in own:
        return config["shared_expert_intermediate_size"]
    return (config.get("n_shared_experts") or 0) * expert_size(config) if parts.shared_experts in own else 0


def has_latent_attention(config: Config) -> bool:
    """True for multi-latent attention."""
    return parts.latent_attention in parts.parts_of(config)


def _norms(config: Config) -> LayerParameters:
    return LayerParameters(whole=2 * config["hidden_size"])


def _grouped_attention(config: Config) -> LayerParameters:
    """h (q + 2 kv) of queries, keys and values, and q h of the projection behind attention."""
    return LayerParameters(split=config["hidden_size"] * 2 * (query_size(config) + key_size(config)))


def _qkv_bias(config: Config) -> LayerParameters:
    return LayerParameters(split=query_size(config) + 2 * key_size(config))


def _qk_norms(config: Config) -> LayerParameters:
    return LayerParameters(whole=2 * head_size(config))


def _latent_attention(config: Config) -> LayerParameters:
    """The way down is whole on every rank in Transformer Engine's layers, as its norms are; the
    way up is split.
    """
    parts.latent_attention(config)  # raises for what Megatron can't express
    query, key = config["q_lora_rank"], config["kv_lora_rank"]
    heads, value, rope = config["num_attention_heads"], config["v_head_dim"], config["qk_rope_head_dim"]
    down = config["hidden_size"] * (query + key + rope) + query + key
    up = heads * (query * (config["qk_nope_head_dim"] + rope) + key * (config["qk_nope_head_dim"] + value))
    return LayerParameters(split=up + heads * value * config["hidden_size"], whole=down)


def _indexer(config: Config) -> LayerParameters:
    """q n d of n heads of d numbers, h d of the keys, h n of the heads' weights, and a norm with a bias."""
    heads, size, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
    return LayerParameters(whole=config["q_lora_rank"] * heads * size + hidden * (size + heads) + 2 * size)


def _dense_mlp(config: Config) -> LayerParameters:
    return LayerParameters(split=3 * config["hidden_size"] * config["intermediate_size"])


def _experts(config: Config) -> LayerParameters:
    experts, hidden = parts.num_experts(config), config["hidden_size"]
    return LayerParameters(whole=experts * hidden, routed=experts * 3 * hidden * expert_size(config))


def _stacked_experts(config: Config) -> LayerParameters:
    """As `_experts`, with a bias of each output and of the router."""
    experts, hidden = parts.num_experts(config), config["hidden_size"]
    biases = experts * (2 * expert_size(config) + hidden)
    return _experts(config) + LayerParameters(whole=experts, routed=biases)


def _output_bias(config: Config) -> LayerParameters:
    return LayerParameters(whole=config["hidden_size"])


def _sinks(config: Config) -> LayerParameters:
    return LayerParameters(split=config["num_attention_heads"])


def _router_bias(config: Config) -> LayerParameters:
    return LayerParameters(whole=parts.num_experts(config))


def _shared_experts(config: Config) -> LayerParameters:
    return LayerParameters(split=3 * config["hidden_size"] * shared_size(config))


def _gated_attention(config: Config) -> LayerParameters:
    """h (2 q + 2 kv) of queries, their gates, keys and values, and q h of the projection behind attention."""
    return _grouped_attention(config) + LayerParameters(split=config["hidden_size"] * query_size(config))


def _delta_net(config: Config) -> LayerParameters:
    """h (2 k + 2 v + 2 n) of the projections, v h of the one behind, the convolution of 2 k + v channels, two
    numbers a value head n, and a norm of one head.
    """
    hidden, (keys, values, heads) = config["hidden_size"], parts.delta_sizes(config)
    split = hidden * (2 * keys + 2 * values + 2 * heads) + hidden * values + 2 * heads
    split += config["linear_conv_kernel_dim"] * (2 * keys + values)
    return LayerParameters(split=split, whole=config["linear_value_head_dim"])


def _gated_shared_expert(config: Config) -> LayerParameters:
    return _shared_experts(config) + LayerParameters(whole=config["hidden_size"])


PARTS: dict[Callable, Callable[[Config], LayerParameters]] = {
    parts.norms: _norms,
    parts.grouped_attention: _grouped_attention,
    parts.gated_attention: _gated_attention,
    parts.delta_net: _delta_net,
    parts.grouped_delta_net: _delta_net,
    parts.qkv_bias: _qkv_bias,
    parts.output_bias: _output_bias,
    parts.sinks: _sinks,
    parts.qk_norms: _qk_norms,
    parts.latent_attention: _latent_attention,
    parts.indexer: _indexer,
    parts.dense_mlp: _dense_mlp,
    parts.experts: _experts,
    parts.mixtral_experts: _experts,
    parts.stacked_experts: _stacked_experts,
    parts.rows_of_experts: _experts,
    parts.router_bias: _router_bias,
    parts.shared_experts: _shared_experts,
    parts.gated_shared_expert: _gated_shared_expert,
}
"""Each part of `models.architectures` -> its parameters in one layer."""
ONLY_WITH_EXPERTS = {
    parts.experts,
    parts.mixtral_experts,
    parts.stacked_experts,
    parts.rows_of_experts,
    parts.router_bias,
    parts.shared_experts,
    parts.gated_shared_expert,
}
OF_DELTA_NETS = {parts.delta_net, parts.grouped_delta_net}
"""Those of a layer whose attention is a gated delta net alone."""
OF_ATTENTION = {parts.gated_attention, parts.qk_norms}
"""Those that such a layer lacks."""
