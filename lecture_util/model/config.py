"""A model's shape, and the published shapes the course computes with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


class UnsupportedModel(ValueError):
    """The checkpoint needs something that our Transformer does not do."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of low rotary frequencies. Source: transformers, `rope_type="llama3"`.

    Wavelengths above original_context/low_freq_factor are slowed by `factor`, those below
    original_context/high_freq_factor are kept, and those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Config:
    """Shape of a Llama-family decoder. Integers for a model, SymPy symbols for algebra.

    D, F   model width, MLP width          H   head width
    K, G   KV heads, queries per KV head   L   layers
    N      query heads; derived, N = K*G   V   vocabulary
    """

    D: Any
    F: Any
    K: Any
    G: Any
    H: Any
    L: Any
    V: Any
    tied: bool = False
    qkv_bias: bool = False
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    max_context: int = 4096

    @property
    def N(self) -> Any:
        return self.K * self.G

    def __post_init__(self) -> None:
        for name in (*"DFKGHLV", "max_context"):
            value = getattr(self, name)
            symbolic = hasattr(value, "free_symbols")
            if not symbolic and (type(value) is not int or value < 1):
                raise ValueError(f"Config.{name} is {value!r}: expected a whole number, at least 1")
        for name in ("rope_base", "norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"Config.{name} is {value!r}: expected a number above 0")
        if isinstance(self.H, int) and self.H % 2:
            raise ValueError(f"Config.H is {self.H}: rotary embeddings pair dimensions, so even")

    def with_kv_heads(self, K: Any) -> Config:
        """The same query heads over K KV heads, as GQA does. K must divide N."""
        if isinstance(K, int) and isinstance(self.N, int) and (K < 1 or self.N % K):
            raise ValueError(f"K={K} does not divide N={self.N}: choose a divisor of {self.N}")
        return replace(self, K=K, G=self.N // K if isinstance(self.N, int) else self.N / K)

    @classmethod
    def from_hf(cls, hf: dict) -> Config:
        """Read a Hugging Face `config.json`.

        Raises: UnsupportedModel naming the field and what it held.
        """
        try:
            return cls._from_hf(hf)
        except KeyError as error:
            raise UnsupportedModel(f"config.json lacks {error}: is it a model's config?") from error
        except (TypeError, AttributeError, ZeroDivisionError) as error:
            raise UnsupportedModel(
                f"config.json has a value of the wrong kind ({error}): sizes are whole numbers"
            ) from error
        except UnsupportedModel:
            raise
        except ValueError as error:
            raise UnsupportedModel(f"config.json: {error}") from error

    @classmethod
    def _from_hf(cls, hf: dict) -> Config:
        if not isinstance(hf, dict):
            raise UnsupportedModel(f"config.json holds {type(hf).__name__}: expected an object")
        names = hf.get("architectures") or ["missing"]
        arch = names if isinstance(names, str) else names[0]
        if arch not in SUPPORTED:
            raise UnsupportedModel(
                f"architecture {arch!r} is not one of {', '.join(SUPPORTED)}: "
                "this course's Transformer is the Llama family only"
            )
        for key in ("attention_bias", "mlp_bias"):
            if hf.get(key):
                raise UnsupportedModel(f"{key}=true: only Qwen2's bias on q, k and v is supported")
        if hf.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act={hf['hidden_act']!r}: only 'silu' is supported")
        rope = hf.get("rope_parameters") or {
            "rope_theta": hf.get("rope_theta", 10_000.0),
            **(hf.get("rope_scaling") or {}),
        }
        N, K = hf["num_attention_heads"], hf.get("num_key_value_heads") or hf["num_attention_heads"]
        if N % K:
            raise UnsupportedModel(f"num_attention_heads={N} is not a multiple of K={K}")
        context = hf.get("max_position_embeddings", 4096)
        window = hf.get("sliding_window") if hf.get("use_sliding_window", True) else None
        return cls(
            D=hf["hidden_size"],
            F=hf["intermediate_size"],
            K=K,
            G=N // K,
            H=hf.get("head_dim") or hf["hidden_size"] // N,
            L=hf["num_hidden_layers"],
            V=hf["vocab_size"],
            tied=hf.get("tie_word_embeddings", False),
            qkv_bias=arch == "Qwen2ForCausalLM",
            rope_base=rope["rope_theta"],
            rope_scaling=_rope_scaling(rope),
            norm_eps=hf.get("rms_norm_eps", 1e-6),  # transformers' default
            # Full attention equals windowed attention only up to the window.
            max_context=min(context, window) if window else context,
        )

    def to_hf(self) -> dict:
        """The `config.json` that transformers needs to open our checkpoints."""
        rope: dict = {"rope_type": "default", "rope_theta": self.rope_base}
        if (s := self.rope_scaling) is not None:
            rope |= {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_context,
            }
        family = "Qwen2" if self.qkv_bias else "Llama"
        window = {}
        if family == "Llama" and self.D % self.N:
            # A pruned model may have such a D. transformers' Llama refuses it though head_dim says
            # all (huggingface/transformers#46082); its Mistral without a window is the same model.
            family, window = "Mistral", {"sliding_window": None}
        return {
            "architectures": [f"{family}ForCausalLM"],
            "model_type": family.lower(),
            **window,
            "hidden_size": self.D,
            "intermediate_size": self.F,
            "num_attention_heads": self.N,
            "num_key_value_heads": self.K,
            "head_dim": self.H,
            "num_hidden_layers": self.L,
            "vocab_size": self.V,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_context,
            "rope_parameters": rope,
        }


def _rope_scaling(rope: dict) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(
            f"RoPE scaling {kind!r} is not supported, only 'default' and 'llama3': "
            "with the wrong rotation every logit past the original context would be wrong"
        )
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context=rope["original_max_position_embeddings"],
    )


# Sources: Lightning-AI/litgpt litgpt/config.py; parameter and cache sizes are computed and tested.
PUBLISHED: dict[str, Config] = {
    "llama-2-7b": Config(D=4096, F=11008, K=32, G=1, H=128, L=32, V=32000),
    "llama-2-13b": Config(D=5120, F=13824, K=40, G=1, H=128, L=40, V=32000),
    "llama-2-70b": Config(D=8192, F=28672, K=8, G=8, H=128, L=80, V=32000),
    "llama-3-8b": Config(
        D=4096, F=14336, K=8, G=4, H=128, L=32, V=128256, rope_base=500_000.0, max_context=8192
    ),
    "llama-3-70b": Config(
        D=8192, F=28672, K=8, G=8, H=128, L=80, V=128256, rope_base=500_000.0, max_context=8192
    ),
    "mistral-7b": Config(D=4096, F=14336, K=8, G=4, H=128, L=32, V=32000),
    "smollm2-135m": Config(
        D=576, F=1536, K=3, G=3, H=64, L=30, V=49152,
        tied=True, rope_base=100_000.0, max_context=8192,
    ),
    "smollm2-360m": Config(
        D=960, F=2560, K=5, G=3, H=64, L=32, V=49152,
        tied=True, rope_base=100_000.0, max_context=8192,
    ),
    "smollm2-1.7b": Config(
        D=2048, F=8192, K=32, G=1, H=64, L=24, V=49152,
        tied=True, rope_base=130_000.0, max_context=8192,
    ),
    "qwen2.5-0.5b": Config(
        D=896, F=4864, K=2, G=7, H=64, L=24, V=151936,
        tied=True, qkv_bias=True, rope_base=1_000_000.0, norm_eps=1e-6, max_context=32768,
    ),
}  # fmt: skip
