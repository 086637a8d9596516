"""Sixty more faults that act always (Z01..Z60), by a sixth author, each ported from a public report on an inference engine, kernel, loader or
converter. No older set ports one of these reports. 23 are alike in all layers that have the operation, 20 are local, 17 are subtle. Sizes of
tiles, windows, buffers and ranks are scaled down to the models; brackets say where a case differs from its report.

FAULTS: id -> record as in public_faults_e.py. `kind` is the part of the engine, `family` the sort of mistake.
"""

import zlib
from types import SimpleNamespace

import numpy as np
from engine import F32, Engine

FAULTS = {}
GH = "https://github.com/"
SUBTLE, ALIKE, LOCAL = "subtle", "alike", "local"


def fault(id, kind, reach, model, family, cause, source, tokens=40, chunk=None, prefix=0, threads=1):
    def add(cls):
        FAULTS[id] = SimpleNamespace(id=id, kind=kind, model=model, family=family, cause=cause, source=GH + source, engine=cls)
        vars(FAULTS[id]).update(reach=reach, tokens=tokens, chunk=chunk, prefix=prefix, threads=threads)
        return cls

    return add


# --- what several faults need -----------------------------------------------------------------------------------------------------------


def block_bytes(data, size):  # [blocks, size], a copy
    return np.array(data).view(np.uint8).reshape(-1, size)


def halves(b):  # [blocks, 2] bytes -> [blocks, 1]
    return np.ascontiguousarray(b).view(np.float16).astype(F32)


def seeded(*words):  # numbers that look random, and are the same in every run
    return np.random.default_rng(zlib.crc32(" ".join(map(str, words)).encode()))


def probabilities(engine, q, k, visible, n):  # [H, T, K], [H, S, K], [T, S] -> [H, T, S]
    s = engine.cap(engine.scale_scores(engine.num.qk(q, k), n), n)
    return engine.softmax(np.where(visible, s, F32(-np.inf)), n)


# --- alike in all layers: RoPE ----------------------------------------------------------------------------------------------------------


@fault(
    "Z01", "rope", ALIKE, "llama_mha", "formula",
    "the flag for the forward direction is false at the only place of the call: pairs are turned backwards",
    "ngxson/llama.cpp/pull/59",
)  # fmt: skip
class _(Engine):
    def rotate(self, x, sin, cos):
        return super().rotate(x, -sin, cos)


@fault(
    "Z03", "rope", ALIKE, "qwen3", "layout",
    "cosines and sines are laid out twice in a row (0, 0, 1, 1, ...) and the kernel turns halves: the two numbers of a pair get two angles",
    "huggingface/diffusers/issues/13546",
)  # fmt: skip
class _(Engine):
    def rotate(self, x, sin, cos):
        j = sin.shape[-1]
        sin, cos = np.repeat(sin, 2, axis=-1), np.repeat(cos, 2, axis=-1)
        a, b, out = x[..., :j], x[..., j : 2 * j], x.copy()
        out[..., :j], out[..., j : 2 * j] = a * cos[..., :j] - b * sin[..., :j], b * cos[..., j:] + a * sin[..., j:]
        return out


@fault(
    "Z04", "rope", ALIKE, "llama_theta", "layout",
    "pair i of adjacent numbers reads the table at i / 2, as if it were laid out twice in a row: the frequencies of the second half are unused",
    "vllm-project/vllm-ascend/pull/11027",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        f = super().frequencies(n)
        return f[np.arange(len(f)) // 2]


@fault(
    "Z05", "rope", ALIKE, "phi2", "layout",
    "channels that are not rotated are copied from a contiguous source, and queries and keys are views of the joint rows of queries, keys and "
    "values: they come from other heads and tokens [the report names the place]",
    "ggml-org/llama.cpp/pull/14580",
)  # fmt: skip
class _(Engine):
    def qkv(self, x, n):
        parts = super().qkv(x, n)
        self.joint = np.concatenate(parts, axis=-1).ravel()
        return parts

    def rope(self, x, pos, n, which="q"):
        y, width = super().rope(x, pos, n, which), self.c.rope_width
        start = 0 if which == "q" else self.c.heads * self.c.head_dim
        y[..., width:] = self.joint[start : start + x.size].reshape(x.shape)[..., width:]
        return y


@fault(
    "Z06", "rope", ALIKE, "llama", "formula",
    "Llama 3's blend between the kept and the slowed frequencies runs the wrong way: what should be kept most is slowed most",
    "ml-explore/mlx-examples/pull/907",
)  # fmt: skip
class _(Engine):
    def rope_factors(self):  # 1 / f = (1 - s) / 8 + s, with 1 - s for s
        return 1 / (F32(1.125) - 1 / super().rope_factors())


# --- alike in all layers: attention -----------------------------------------------------------------------------------------------------


@fault(
    "Z07", "attention", ALIKE, "llama_g3", "layout",
    "heads are not brought behind tokens before they are joined: a row holds one head's results for several tokens",
    "jsbaan/transformer-from-scratch/pull/6",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        return np.ascontiguousarray(y.swapaxes(0, 1)).reshape(y.shape)


@fault(
    "Z09", "attention", ALIKE, "starcoder2", "formula",
    "the scale is multiplied behind the softmax: scores are too large, and probabilities sum to the scale",
    "FrancescoSaverioZuppichini/ViT/issues/2",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return s

    def softmax(self, s, n):
        return super().softmax(s, n) * F32(self.c.attn_scale)


@fault(
    "Z10", "attention", ALIKE, "smollm3", "mask",
    "masked scores are set to minus the epsilon (1e-12) in place of minus infinity: later tokens have a score of 0",
    "hyunwoongko/transformer/issues/10",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        return super().softmax(np.where(np.isneginf(s), F32(-1e-12), s), n)


@fault(
    "Z11", "attention", ALIKE, "gemma", "kernel",
    "the launch has at most 16 threads for the channels of a head: attention's results for the others stay zero",
    "mni-ml/framework/pull/39",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        y = super().attend(q, k, v, qpos, kpos, n)
        y[..., 16:] = 0
        return y


# --- alike in all layers: norms, residuals, feed-forward --------------------------------------------------------------------------------


@fault(
    "Z12", "residual", ALIKE, "granite", "formula",
    "branches are added to the normalised rows they were computed from, and the stream itself is dropped",
    "lbcb-sci/RiNALMo/issues/9",
)  # fmt: skip
class _(Engine):
    def layer(self, h, n, pos):
        self.rows_of = {}
        return super().layer(h, n, pos)

    def put(self, name, x, n=None):
        if name in ("attn_norm", "ffn_norm"):
            self.rows_of[name] = x
        return super().put(name, x, n)

    def residual(self, h, y, n, which):
        return super().residual(self.rows_of[f"{which}_norm"], y, n, which)


@fault(
    "Z13", "norm", ALIKE, "gemma2", "loader",
    "the converter maps the norm in front of the feed-forward part to the wrong name: its stored weights stay 0, that is 1 with Gemma's offset",
    "NVIDIA-NeMo/Speech/issues/11951",
)  # fmt: skip
class _(Engine):
    def load(self, t):
        return np.ones_like(super().load(t)) if t.name.endswith("ffn_norm.weight") else super().load(t)


@fault(
    "Z14", "norm", ALIKE, "gemma3", "loader",
    "the norm in front of the feed-forward part gets the weights of the norm behind attention",
    "NVIDIA-NeMo/Megatron-Bridge/pull/4201",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        return super().norm(x, name.replace("ffn_norm", "post_attention_norm"), n)


@fault(
    "Z15", "ffn", ALIKE, "phi3", "layout",
    "the joint matrix is taken for rows of gate and up in turn, and it has all of gate, then all of up",
    "vllm-project/vllm/pull/29273",
)  # fmt: skip
class _(Engine):
    def split_gate_up(self, w):
        return w[::2], w[1::2]


@fault(
    "Z16", "ffn", ALIKE, "mixtral", "formula",
    "the activation has another model's beta as its default: gates multiply up + 1 [the report: a default of 0 where 1 is right]",
    "sgl-project/sglang/pull/39939",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        return super().gated(gate, up + F32(1), n)


# --- alike in all layers: experts -------------------------------------------------------------------------------------------------------


@fault(
    "Z17", "experts", ALIKE, "qwen3moe", "layout",
    "gate and up are halves of one tensor, and the kernel for sorted tokens steps through a half as if it were contiguous: expert e has the "
    "e-th of the rows of gates and ups in turn",
    "ml-explore/mlx/issues/4055",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            gate, up = (f"blk.{n}.ffn_{x}_exps.weight" for x in ("gate", "up"))
            joint = np.stack([self.w[gate], self.w[up]], axis=1).reshape(-1, *self.w[gate].shape[1:])
            count = len(self.w[gate])
            self.w[gate], self.w[up] = joint[:count], joint[1 : count + 1]


@fault(
    "Z18", "experts", ALIKE, "qwen2moe", "formula",
    "the routed experts' sum is returned, and the shared expert is never added to it",
    "divyamakkar0/JAXformer/issues/21",
)  # fmt: skip
class _(Engine):
    def feed_forward(self, x, n):
        return self.experts(x, n)


@fault(
    "Z19", "experts", ALIKE, "qwen2moe_s", "formula",
    "the layer's kernel has added the shared expert to the stream before the norm whose output the router reads",
    "1bit-MONSTER/1bit-MONSTER/issues/2618",
)  # fmt: skip
class _(Engine):
    def residual(self, h, y, n, which):
        self.mid = super().residual(h, y, n, which)
        return self.mid

    def linear(self, x, name, n=None):
        if name.endswith("ffn_gate_inp"):
            kept, self.out = self.out, {}
            x = self.norm(self.mid + self.shared_gate(self.dense(x, n, "_shexp"), x, n), f"blk.{n}.ffn_norm", n)
            self.out = kept
        return super().linear(x, name, n)


@fault(
    "Z20", "experts", ALIKE, "qwen2moe_s", "formula",
    "the shared expert takes the last place in the list of chosen experts, and the list is not made longer: the least of the chosen is left out "
    "[in the report any of the chosen]",
    "sgl-project/sglang/pull/8125",
)  # fmt: skip
class _(Engine):
    def combine(self, y, weights):
        return super().combine(y[:, :-1], weights[:, :-1])


# --- alike in all layers: quantised weights ---------------------------------------------------------------------------------------------


@fault(
    "Z21", "weights", ALIKE, "bitnet", "layout",
    "ternary codes 0, 1, 2 are read as 0, +1, -1, and they are -1, 0, +1",
    "chrishayuk/larql/pull/156",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind != "TQ2_0":
            return w
        d = np.repeat(halves(block_bytes(data, 66)[:, 64:]), 256, axis=1).reshape(shape)
        return np.where(w < 0, F32(0), np.where(w == 0, d, -d))


@fault(
    "Z22", "weights", ALIKE, "llama_mxfp4", "layout",
    "the exponents of MXFP4's scales are written with a bias of 125 and read with 127: all weights are a quarter of what they should be",
    "vllm-project/compressed-tensors/pull/538",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        return super().dequantize(data, kind, shape, name) * F32(0.25 if kind == "MXFP4" else 1)


@fault(
    "Z23", "weights", ALIKE, "llama_q4k", "layout",
    "Q4_K: the scales and minima of the groups are ignored, weights are d * code - dmin [with nibbles in a wrong order as well in the report]",
    "cisco-ai-defense/defenseclaw/pull/679",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind != "Q4_K":
            return super().dequantize(data, kind, shape, name)
        b = block_bytes(data, 144)
        code = b[:, 16:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & 15
        return halves(b[:, :2]) * code.reshape(-1, 256).astype(F32) - halves(b[:, 2:4])


@fault(
    "Z24", "weights", ALIKE, "llama_q5k", "kernel",
    "the kernel for reordered Q5_K processes the first half of each block of 256 and leaves out the other",
    "ggml-org/llama.cpp/pull/25690",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind == "Q5_K":
            w.reshape(-1, 256)[:, 128:] = 0
        return w


# --- local: one layer, matrix or head ---------------------------------------------------------------------------------------------------


@fault(
    "Z25", "weights", LOCAL, "gpt2", "layout",
    "matrices are stored by inputs and outputs; the loader turns those whose shape does not fit, and attention's output is square [the "
    "feed-forward matrices in the report]",
    "nntile/nntile/pull/402",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for n in range(self.c.n_layers):
            self.w[f"blk.{n}.attn_output.weight"] = self.w[f"blk.{n}.attn_output.weight"].T


@fault(
    "Z26", "cache", LOCAL, "gemma3", "kernel",
    "the layer without a window falls into the path of models whose values are a part of the keys: the cached keys serve as values",
    "ikawrakow/ik_llama.cpp/pull/1592",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        return super().attend(q, k, v if n in self.c.local else k, qpos, kpos, n)


@fault(
    "Z27", "rope", LOCAL, "gemma3", "config",
    "the layer without a window is turned with the base of the layers that have one [the report: parameters of the two kinds under wrong keys]",
    "huggingface/transformers/pull/41922",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_base = c.local_base
        return c


@fault(
    "Z28", "attention", LOCAL, "gpt2", "config",
    "scores are divided by the layer's number as well, as in a variant of the model: those of layer 1 by 2, of layer 2 by 3 [missing where the "
    "model has it in the report]",
    "TransformerLensOrg/TransformerLens/pull/27",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return super().scale_scores(s, n) / F32(n + 1)


@fault(
    "Z29", "attention", LOCAL, "llama_h8", "kernel",
    "offsets of scores overflow for the last head: its scores are stored elsewhere, and its softmax reads what was there before (zeros)",
    "ggml-org/llama.cpp/pull/28210",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        s = super().scale_scores(s, n)
        s[-1] = 0
        return s


@fault(
    "Z30", "norm", LOCAL, "qwen3moe", "kernel",
    "two heads share a work group and one slot for their sums of squares: both are normalised by the second one's",
    "vllm-project/vllm-xpu-kernels/pull/316",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        if not name.endswith(("attn_q_norm", "attn_k_norm")):
            return super().rms_norm(x, w, eps, name)
        mean = self.num.mean(x * x)
        mean[:, ::2] = mean[:, 1::2]
        return self.num.gain(x * self.num.rsqrt(mean + F32(eps)), w)


@fault(
    "Z31", "experts", LOCAL, "qwen3moe", "parallel",
    "a rank takes its experts out of the joint tensor by their number in the rank: experts 4 to 7 have the weights of experts 0 to 3",
    "THUDM/slime/pull/1799",
)  # fmt: skip
class _(Engine):
    def finish_load(self):
        super().finish_load()
        for name in [name for name in self.w if "_exps" in name]:
            half = self.w[name][: len(self.w[name]) // 2]
            self.w[name] = np.concatenate([half, half])


@fault(
    "Z32", "experts", LOCAL, "mixtral", "config",
    "experts have a capacity in inference too, tokens * used / experts; what comes behind is dropped [an option in the report]",
    "deepspeedai/DeepSpeed/issues/6809",
)  # fmt: skip
class _(Engine):
    def put(self, name, x, n=None):
        if name == "ffn_moe_topk":
            self.top = x
        return super().put(name, x, n)

    def combine(self, y, weights):
        room = self.top.size // self.c.experts
        chosen = self.top.ravel()
        place = np.array([(chosen[:i] == e).sum() for i, e in enumerate(chosen)]).reshape(weights.shape)
        return super().combine(y, weights * (place < room))


@fault(
    "Z33", "matrices", LOCAL, "llama", "kernel",
    "down's inputs are cut in two parts; a part's sums for the first 16 outputs are stored again for each further 16, and so the second "
    "part adds them everywhere",
    "ROCm/rocm-libraries/pull/11962",
)  # fmt: skip
class _(Engine):
    def matmul(self, x, w, name):
        if not name.endswith("ffn_down.weight"):
            return super().matmul(x, w, name)
        half = x.shape[-1] // 2
        return self.num.mm(x[:, :half], w[:, :half]) + np.tile(self.num.mm(x[:, half:], w[:16, half:]), len(w) // 16)


@fault(
    "Z34", "matrices", LOCAL, "bitnet_mha", "kernel",
    "down's kernel writes each token's row to the first: it holds the last token's, and the others stay zero [not a number in the report]",
    "microsoft/BitNet/pull/521",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        y = super().product(x, w, name)
        if name.endswith("ffn_down.weight"):
            y[0], y[1:] = y[-1], 0
        return y


# --- local: the ends of the model -------------------------------------------------------------------------------------------------------


@fault(
    "Z35", "norm", LOCAL, "llama_tied", "formula",
    "the head gets the last layer's rows; the last norm is left out",
    "awslabs/keys_values/issues/139",
)  # fmt: skip
class _(Engine):
    def norm(self, x, name, n):
        return x if name == "output_norm" else super().norm(x, name, n)


@fault(
    "Z36", "head", LOCAL, "qwen2", "parallel",
    "of two devices the second gathers the logits, and copies its part to the beginning: logits from 48 on are never written (zero), the others "
    "are those 48 behind",
    "turboderp-org/exllamav3/issues/233",
)  # fmt: skip
class _(Engine):
    def head(self, x):
        y = super().head(x)
        half = y.shape[1] // 2
        y[:, :half], y[:, half:] = y[:, half:].copy(), 0
        return y


@fault(
    "Z37", "head", LOCAL, "llama_q6k", "layout",
    "Q6_K: of each 128 numbers of the head only the first 32 are written, the others stay zero [all matrices in the report]",
    "1bit-MONSTER/1bit-MONSTER/issues/734",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if name == "output.weight":
            w.reshape(-1, 128)[:, 32:] = 0
        return w


@fault(
    "Z38", "embedding", LOCAL, "llama_q8", "loader",
    "the rows of the quantised table are gathered as codes, and nothing multiplies them by their scales",
    "huggingface/transformers/issues/48350",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if name != "token_embd.weight":
            return super().dequantize(data, kind, shape, name)
        return block_bytes(data, 34)[:, 2:].copy().view(np.int8).astype(F32)


# --- local: positions, chunks, prefixes -------------------------------------------------------------------------------------------------


@fault(
    "Z39", "rope", LOCAL, "minicpm", "positions",
    "positions are taken modulo the length of a training sequence (32): from the 33rd token on they begin again",
    "pytorch/torchtitan/pull/2849",
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos % 32, n, which)


@fault(
    "Z40", "rope", LOCAL, "llama_wide", "positions",
    "the positions of a chunk are those within the chunk, while the mask counts the cache",
    "huggingface/transformers/issues/43082",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def rope(self, x, pos, n, which="q"):
        return super().rope(x, pos - self.start, n, which)


@fault(
    "Z41", "attention", LOCAL, "gemma2", "mask",
    "the window of a later chunk is placed by the row's number in the chunk: its rows see older keys without a window",
    "trymirai/lalamo/pull/200",
    chunk=16,
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        d = qpos[:, None] - kpos
        seen = d >= 0
        return seen & (d - self.start < self.c.window) if n in self.c.local else seen


@fault(
    "Z42", "attention", LOCAL, "gemma", "mask",
    "the first 8 tokens, taken for the prefix of an image, see each other in both directions [the mask of the prefix lets all tokens through in "
    "the report]",
    "huggingface/transformers/pull/30967",
)  # fmt: skip
class _(Engine):
    def visible(self, qpos, kpos, n):
        return super().visible(qpos, kpos, n) | ((qpos < 8)[:, None] & (kpos < 8))


@fault(
    "Z43", "attention", LOCAL, "llama", "kernel",
    "values are summed by groups of keys, as many as the row's keys are times a head's width (16), and only the first group is: of more than 16 "
    "keys every second counts, of more than 32 every third [which ones the report does not say]",
    "timtoole02/Camelid/pull/714",
)  # fmt: skip
class _(Engine):
    def attend(self, q, k, v, qpos, kpos, n):
        heads = self.kv_head(n)
        q, k, v = (x.swapaxes(0, 1) for x in (q, k[:, heads], v[:, heads]))
        groups = -(-(qpos + 1) // self.c.head_dim)
        p = probabilities(self, q, k, self.visible(qpos, kpos, n), n) * (kpos % groups[:, None] == 0)
        return self.num.pv(p.astype(F32), v).swapaxes(0, 1)


@fault(
    "Z44", "cache", LOCAL, "starcoder2", "cache",
    "two drafted tokens that were refused behind the prefix stay in the cache, next to the tokens that have their positions",
    "ml-explore/mlx-lm/pull/1109",
    prefix=24,
)  # fmt: skip
class _(Engine):
    def prepare(self, tokens):
        self.given = tokens
        return tokens

    def begin(self, call):
        super().begin(call)
        if call == "prompt" and self.prefix:
            drafts = (self.given[self.prefix : self.prefix + 2] + 7) % self.c.vocab
            self.forward(drafts, self.prefix)
            self.out = {}


# --- small differences everywhere -------------------------------------------------------------------------------------------------------


@fault(
    "Z45", "rope", SUBTLE, "qwen3_yarn", "formula",
    "YaRN's magnitude is the quotient of two equal numbers, 1: sine and cosine are 12% too small",
    "turboderp-org/exllamav3/issues/259",
)  # fmt: skip
class _(Engine):
    def read_config(self):
        c = super().read_config()
        c.rope_magnitude = 1
        return c


@fault(
    "Z46", "rope", SUBTLE, "qwen3_yarn", "formula",
    "the borders of YaRN's ramp are not rounded to whole pairs, as another model has it",
    "keras-team/keras-hub/pull/2981",
)  # fmt: skip
class _(Engine):
    def yarn_ramp(self, j):
        c = self.c
        low, high = (j * np.log(c.rope_original / (2 * np.pi * b)) / np.log(c.rope_base) for b in (c.yarn_fast, c.yarn_slow))
        low, high = max(low, 0), min(high, 2 * j - 1)
        return 1 - np.clip((np.arange(j) - low) / max(high - low, 0.001), 0, 1)


@fault(
    "Z47", "rope", ALIKE, "qwen3_yarn", "formula",
    "YaRN's factor is multiplied by the base before the power is taken: pairs that should be slowed by it are slowed by a power of it",
    "apache/tvm/pull/18576",
)  # fmt: skip
class _(Engine):
    def frequencies(self, n):
        c, j = self.c, self.c.rope_width // 2
        power, own = np.arange(j) * 2.0 / c.rope_width, self.yarn_ramp(j)
        return c.rope_base**-power * own + (c.rope_scale * c.rope_base) ** -power * (1 - own)


@fault(
    "Z02", "attention", SUBTLE, "qwen2", "config",
    "scores are multiplied by the logarithm of the number of keys, to the base of the length in training (32): an extension that is on for a model "
    "without it",
    "DAMO-NLP-SG/CLEX/issues/1",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return super().scale_scores(s, n) * F32(max(np.log(s.shape[-1]) / np.log(32), 1))


@fault(
    "Z08", "attention", SUBTLE, "qwen3_yarn", "formula",
    "the scale of the scores gets YaRN's magnitude squared, which sine and cosine have already",
    "guoqingbao/xinfer/pull/329",
)  # fmt: skip
class _(Engine):
    def scale_scores(self, s, n):
        return super().scale_scores(s, n) * F32(self.c.rope_magnitude**2)


@fault(
    "Z48", "attention", SUBTLE, "granite", "config",
    "the probabilities' dropout (a tenth, the others larger by a ninth) acts in inference",
    "meta-pytorch/torchtune/pull/1803",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        p = super().softmax(s, n)
        return p * (seeded(n, *p.shape).random(p.shape) >= 0.1) / F32(0.9)


@fault(
    "Z49", "experts", SUBTLE, "mixtral", "config",
    "the noise that training multiplies to the router's inputs, 1% here, is on, and goes to the experts as well",
    "huggingface/transformers/issues/33969",
)  # fmt: skip
class _(Engine):
    def experts(self, x, n):
        return super().experts(x * seeded(n, *x.shape).uniform(0.99, 1.01, x.shape).astype(F32), n)


@fault(
    "Z50", "experts", SUBTLE, "mixtral", "formula",
    "the router's inputs are normalised once more, without weights, behind the norm they come from",
    "NVIDIA-NeMo/Automodel/issues/1852",
)  # fmt: skip
class _(Engine):
    def linear(self, x, name, n=None):
        if name.endswith("ffn_gate_inp"):
            x = x * self.num.rsqrt(self.num.mean(x * x) + self.c.eps)
        return super().linear(x, name, n)


@fault(
    "Z51", "experts", SUBTLE, "qwen3moe", "loader",
    "factors of channels are folded into the norm and into the experts' matrices; the router, which reads the norm too, is left as it was "
    "[the factors are made up, within 10%]",
    "kekzl/imp/pull/1162",
)  # fmt: skip
class _(Engine):
    def linear(self, x, name, n=None):
        if name.endswith("ffn_gate_inp"):
            x = x * seeded(n).uniform(0.9, 1.1, x.shape[-1]).astype(F32)
        return super().linear(x, name, n)


@fault(
    "Z52", "attention", SUBTLE, "llama_mqa", "kernel",
    "the exponential has a least number, 2^-10 here, that minus infinity gets too: masked tokens keep a small weight",
    "torch-spyre/torch-spyre/pull/4522",
)  # fmt: skip
class _(Engine):
    def softmax(self, s, n):
        e = np.maximum(self.num.exp(s - s.max(axis=-1, keepdims=True)), F32(2**-10))
        return e / self.num.total(e)


@fault(
    "Z53", "activation", SUBTLE, "llama_eps", "formula",
    "an activation's limit (1.5; 7 in the report) has a default, and cuts gates and ups of a model that has none",
    "ROCm/aiter/pull/4526",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        return super().gated(np.minimum(gate, F32(1.5)), np.clip(up, F32(-1.5), F32(1.5)), n)


@fault(
    "Z54", "activation", SUBTLE, "gemma3_lin", "kernel",
    "GELU is 0 between -5.5 and -2.5",
    "tenstorrent/tt-metal/issues/20562",
)  # fmt: skip
class _(Engine):
    def gated(self, gate, up, n=None):
        return np.where((gate > F32(-5.5)) & (gate < F32(-2.5)), F32(0), super().gated(gate, up, n))


@fault(
    "Z55", "ternary", SUBTLE, "bitnet", "formula",
    "activations are quantised to int8 by channel, with the largest number of all tokens, where each token has its scale",
    "vllm-project/compressed-tensors/pull/393",
)  # fmt: skip
class _(Engine):
    def product(self, x, w, name):
        if name not in self.int8:
            return super().product(x, w, name)
        scale = F32(127) / np.maximum(np.abs(x).max(axis=0, keepdims=True), F32(1e-5))
        return self.matmul(np.rint(x * scale) / scale, w, name)


# --- few numbers ------------------------------------------------------------------------------------------------------------------------


@fault(
    "Z56", "weights", SUBTLE, "llama_q4", "kernel",
    "8 is subtracted from four codes in one word: a code below 8 borrows from the next, which is one too small [signed codes in the report]",
    "gittensor-ai-lab/sparkinfer/pull/723",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        if kind != "Q4_0":
            return super().dequantize(data, kind, shape, name)
        b = block_bytes(data, 18)
        codes = np.concatenate([b[:, 2:] & 15, b[:, 2:] >> 4], axis=1).astype(np.int32).reshape(-1, 4) - 8
        for lane in range(1, 4):
            codes[:, lane] -= codes[:, lane - 1] < 0
        return halves(b[:, :2]) * codes.reshape(-1, 32).astype(F32)


@fault(
    "Z57", "ternary", SUBTLE, "bitnet_mha", "loader",
    "threads that pack rows into common bytes overwrite each other's bits: one code in 2000 is lost and becomes 0, which stands for -1",
    "microsoft/onnxruntime/pull/27216",
)  # fmt: skip
class _(Engine):
    def dequantize(self, data, kind, shape, name):
        w = super().dequantize(data, kind, shape, name)
        if kind != "TQ2_0":
            return w
        d = np.repeat(halves(block_bytes(data, 66)[:, 64:]), 256, axis=1).reshape(shape)
        return np.where(seeded(name).random(w.shape).reshape(shape) < 0.0005, -d, w.reshape(shape))


@fault(
    "Z58", "norm", SUBTLE, "stablelm", "kernel",
    "a race: the last 16 channels of every fourth row read the reciprocal root, where the mean was a moment ago",
    "ml-explore/mlx/pull/2340",
)  # fmt: skip
class _(Engine):
    def layer_norm(self, x, w, b):
        y, mean = super().layer_norm(x, w, b), self.num.mean(x)
        r = self.num.rsqrt(self.num.mean((x - mean) * (x - mean)) + self.c.eps)
        late = np.arange(len(x)) % 4 == 3
        y[late, -16:] += ((mean - r) * r * w)[late, -16:]
        return y


@fault(
    "Z59", "norm", SUBTLE, "qwen3", "kernel",
    "a race: the last 8 channels of every fourth token's queries get the next token's partial sum of squares as their factor",
    "gittensor-ai-lab/sparkinfer/pull/705",
)  # fmt: skip
class _(Engine):
    def rms_norm(self, x, w, eps, name):
        y = super().rms_norm(x, w, eps, name)
        if name.endswith("attn_q_norm"):
            t = np.arange(2, len(x) - 1, 4)
            part = (x[t + 1, :, :8] ** 2).sum(axis=-1, keepdims=True, dtype=F32)
            y[t, :, -8:] = x[t, :, -8:] * part * w[-8:]
        return y


@fault(
    "Z60", "matrices", SUBTLE, "llama_long", "kernel",
    "the borders of the work groups are rounded to whole steps of 64 inputs, and a row of down has 96: for the outputs between the borders the "
    "last 32 inputs are in nobody's part [the report names the place]",
    "ggml-org/llama.cpp/pull/8311",
)  # fmt: skip
class _(Engine):
    def matmul(self, x, w, name):
        y = super().matmul(x, w, name)
        if name.endswith("ffn_down.weight"):
            y[:, 16:32] -= self.num.mm(x[:, 64:], w[16:32, 64:])
        return y
