"""What can be typed: every command with its arguments, in the form that parser.py reads.

Nothing is imported here, so that help and wrong usage are answered at once. tests/cli/test_commands.py compares the names that options take
with the library's tables.
"""

from typing import NamedTuple


class Command(NamedTuple):
    """A command, which the module of its name runs."""

    summary: str
    arguments: str
    examples: str

    @classmethod
    def of(cls, text: str) -> "Command":
        """The parts of a text: its first line, its last two, and what is between them."""
        summary, *arguments, one, two = text.splitlines()
        return cls(summary, "\n".join(arguments), f"Examples:\n{one}\n{two}")


# --- the model and its tokens ---------------------------------------------------------------------------------------------------------

_A_MODEL = "a GGUF file or a Hugging Face folder, or its name at Hugging Face (ORG/NAME) or Ollama (NAME:TAG)"
_DOWNLOAD = "--download: fetch a model from Hugging Face if it is not in the cache (extra `hub`)"
_MODEL = f"MODEL: {_A_MODEL}\n{_DOWNLOAD}"
_TOKENS = """--tokens 1,2,3: token ids between commas or blanks
--tokens-file F: token ids [T] or [B, T] as .npy, .json or .txt (a sequence a line); padded ones as .npz or .json with input_ids and
 attention_mask or lengths
--text S: text for the model's tokenizer; byte-level BPE needs the extra `text`"""
"""Of which one may be given; inputs.py reads them."""
_MODEL_AND_TOKENS = f"{_MODEL}\n\none of\n{_TOKENS}\n"

_THREADS = "--threads N: number of threads; the result does not depend on it"
_LOADING = """--allow-nan: load a model even if its weights hold NaN or infinity
--i2s-layout 128/32|64/16|4-rows = 128/32: layout of I2_S matrices, which the file does not say: 128/32 as released, 64/16 as bitnet.cpp
 writes for ARM, 4-rows as it writes on x86 without ACT_PARALLEL"""
_MODEL_OPTIONS = f"""{_LOADING}
--override NAME=N+: replace a setting of the file: context, eps, rope_base, rope_scaling, window, pooling; repeatable. KEY=none ignores an
 unknown key
--allow-beyond-context: allow more tokens than the model was trained for"""
_RARELY = f"[rarely needed]\n{_MODEL_OPTIONS}"

# --- how to compute -------------------------------------------------------------------------------------------------------------------

_DIALECT = f"""--as dialect@exact|bitnet.cpp|llama.cpp = exact: the engine whose roundings to follow (default exact: the definition)
--precision kv=TYPE: the type of the KV cache: float32, float16, bfloat16, int8, q8_0, q4_0 (default float32)
{_THREADS}"""
_COMPUTING = f"""{_DIALECT}
--device cpu|numpy|cuda|auto = cpu: where to compute: cuda is an NVIDIA GPU (extra `cuda`), auto a GPU if there is one, numpy the
 contract in plain NumPy, which is slow; the bits are the same
--metrics F.json: count and time every operation: JSON to this file, a table to standard error"""


def cluster_arguments(what: str) -> str:
    """--scheduler and --workers. what: the work that they divide, in words."""
    return f"""at most one of
--scheduler ADDRESS: compute {what} on a Dask cluster: tcp://HOST:PORT or tls://HOST:PORT (extra `cluster`)
--workers N: compute {what} in N processes of this machine (extra `cluster`)"""


# --- what is judged, and what is written ----------------------------------------------------------------------------------------------

_PROFILES = (
    "exact|bitnet.cpp|llama.cpp|llama.cpp-f16kv|llama.cpp-flash|llama.cpp-q8kv|transformers-bf16|mlx-bf16|vllm-bf16|transformers-f16"
    "|mlx-f16|vllm-f16"
)
_PROFILE = f"""--as profile@{_PROFILES}: the kind of engine, whose roundings are right (default: the definition, in the types that the
 dump's numbers show; exact: the definition in float32)
--precision act=bf16,kv=q8_0,...: the types that the engine keeps numbers in: act (tensors), kv (the cache), probs, acc, attn_acc (sums),
 scale (of int8 codes), head"""
_FORMATS = (
    "npz|npy|safetensors|torch|aprt|nodes|llama-logits|logits|raw|text|json|eval-callback|bitnet-rs|bitnet-rs-lines|bitnet-rs-logits"
    "|server-answer"
)
_FORMAT = """--format npz|npy|safetensors|aprt|llama-logits|logits|raw|bitnet-rs-lines: format to write (default: by the end of the
 file's name)"""
_REPORT = """--format text|json|github|junit|tap = text: form of the report; github is text and an annotation of GitHub Actions, tap the
 Test Anything Protocol
-q, --quiet: print one line
-v, --verbose: print all layers, the tables of logits and of wrong tensors, and who is closer to float64
--html F.html: write the report as one HTML file, with the numbers of each tensor
--plot F.png: draw the heat map to this picture file (extra `plots`)"""
OF_DUMPS = f"""[two dumps]
--dump-format {_FORMATS}: format of both dumps (default: recognised by their content)
--partial: compare the tensors that both dumps have; without it, a tensor that THEIRS lacks is an error, but for codes, scales and scores
--tolerance X: WRONG where a number differs by more than this part of its tensor's largest, in place of what roundings reach
--receipt F.json: write BitNet-rs's parity receipt of both dumps' logits, THEIRS as rust, OURS as cpp
--by-receipt F.json: read a parity receipt: WRONG if a position that passed there now misses its thresholds"""
"""The options of `compare` that are for dumps alone."""
OF_MODELS = f"""[two models, with --models]
{_DOWNLOAD}
at most one of
{_TOKENS}

{_COMPUTING}
{_RARELY}"""
"""Its options that are for models alone."""

# --- the commands: judging and what it needs, then the others. Each with its arguments, and two examples ------------------------------

_TEXTS = {
    "check": f"""Judge another engine's dump, or a running server; without arguments, the embedded recording of bitnet.cpp.

[what to judge]
MODEL?: {_A_MODEL} (default: the embedded one, and its recording)
at most one of
{_TOKENS}

--theirs DUMP: the dump to judge: intermediate tensors or logits, [T, width], or [B, T, width] of several sequences
--engine CMD: run this command and judge what it writes: CMD has {{model}}, {{tokens}} and {{out}} in it, as in `hunt`
--endpoint URL: judge a running server, whose kind is the default of --as: llama-server, SGLang, vLLM, or another OpenAI-style
 one with token ids
--dump-format {_FORMATS}: format of the dump (default: recognised by its content)
--last: the dump holds logits of the last position only
--prefix N = 0: the dump has no rows of the first N tokens: the engine reused their keys and values
[the engine]
{_PROFILE}
--strict: roundings that are not declared are WRONG, not NARROW
[output]
{_REPORT}
[rarely needed]
--budget S = 15.0: seconds of computing that the search for causes may take, 0 for the verdict alone
--predict N = 16: with --endpoint: tokens to generate greedily
--top-logprobs K = 20: with --endpoint: log-probabilities to ask for at each token
--timeout S = 60.0: with --endpoint: seconds for one request; with --engine: for the run
{_DOWNLOAD}
{_THREADS}
{_MODEL_OPTIONS}

  bitnet-np check model.gguf --tokens 1,2,3 --theirs dump
  bitnet-np check model.gguf --text "Once upon a time" --endpoint http://127.0.0.1:8080""",
    "demo": """Write a model, tokens, a right and a wrong dump to try `check` on, and print the commands to run.

folder@DIR: a new folder

  bitnet-np demo try
  bitnet-np demo try --json""",
    "hunt": f"""Run your engine on random models and calls, and say under which condition it fails.

MODEL?: {_A_MODEL}, whose family, types and settings all models of the hunt have (default: all that the engine takes)

one of
--engine CMD: the engine's command, with {{model}}, {{tokens}} and {{out}} in it, and {{chunk}}, {{threads}} and {{prefix}} if it takes
 them; or a server's, with {{model}} and {{port}}.
 {{tokens}}.txt, {{tokens}}.json or {{tokens}}.npy names the kind of file. No shell runs it
--case DIR: run the case of a folder again

--time S = 60.0: seconds for the hunt
--runs N: end after N runs
--run-time S = 20.0: seconds after which a run hangs
--workers N = 2: runs at a time
--single: calls of one sequence only
--seed N = 0: another seed draws other cases
--out DIR: write failing cases to this folder; those that it has are run first
{_PROFILE}

  bitnet-np hunt --engine "./engine {{model}} {{tokens}} {{out}}"
  bitnet-np hunt model.gguf --engine "./engine {{model}} {{tokens}} {{out}} {{chunk}}" --time 600 --out cases""",
    "compare": f"""Compare two dumps without a model, or two models.

OURS: the dump, or with --models the model, taken as the reference
THEIRS: the one to compare with it
--models: OURS and THEIRS are models of one family, such as an original and a quantised one
{OF_DUMPS}
[output]
{_REPORT}
{OF_MODELS}

  bitnet-np compare ours.npz theirs.npz --partial
  bitnet-np compare --models model.gguf quantised.gguf --tokens-file tokens.npy""",
    "logits": f"""Compute reference logits of token ids.

{_MODEL_AND_TOKENS}
--mode parallel|incremental|auto: compute whole sequences at once (parallel), through a KV cache (incremental), or as their length
 suggests (auto); the bits are the same (default: the environment variable BITNET_NP_MODE, or auto)
--parallel-threshold N = 16: number of tokens above which auto is parallel
--chunk N: tokens that go through the KV cache at a time (default 1; implies --mode incremental)
--last: logits of the last position only
--out F.npy: write the logits as float32
{_COMPUTING}
{_RARELY}

  bitnet-np logits model.gguf --tokens 1,2,3 --out reference.npy
  bitnet-np logits model.gguf --tokens-file tokens.npy --last --json""",
    "trace": f"""Write every intermediate tensor of a forward pass.

{_MODEL_AND_TOKENS}
--layers 0,3-5: layers to write (default: all); tensors that belong to no layer are always written
--names A,B: tensors to write, such as attn_norm,l_out (default: all but the attention scores)
--scores: also write attention scores and probabilities
--plot F.png: draw the attention probabilities to this picture file (needs --scores, extra `plots`)
{_FORMAT}
--out F!: file or folder to write
{_DIALECT}
{_RARELY}

  bitnet-np trace model.gguf --tokens 1,2,3 --out ours.npz
  bitnet-np trace model.gguf --tokens 1,2,3 --out ours.npz --layers 0,3-5 --names attn_norm,l_out""",
    "inspect": f"""Show what a model file holds and whether it is supported.

{_MODEL}
--tensors: list every tensor
--points: list the tensors of a forward pass by the names that dumps use

  bitnet-np inspect model.gguf
  bitnet-np inspect model.gguf --points""",
    "tokenize": f"""Show the token ids of a text or chat, or the text of token ids, piece by piece; judge those of another tokenizer.

{_MODEL}

one of
{_TOKENS}
--messages F.json: messages of a chat in the model's template: [{{"role": "user", "content": "Hi"}}, ...]

--chat: put the text into the model's chat template as the user's message
--theirs F: judge the ids that another tokenizer gives, in a file like that of --tokens-file

  bitnet-np tokenize model.gguf --text "Once upon a time"
  bitnet-np tokenize model.gguf --tokens 1,2,3""",
    "generate": f"""Continue a prompt, token by token.

MODEL?: {_A_MODEL} (default: the embedded demo model)
{_DOWNLOAD}
one of
{_TOKENS.replace("--text ", "--prompt text@")}
--prompts-file F: file with a JSON object on each line: {{"id": ..., "prompt": text}} or {{"id": ..., "tokens": [...]}}

--batch N: number of prompts computed at a time (default 4); the result does not depend on it
--chat: put the prompt into the model's chat template as the user's message
-n N: most tokens to generate (default 64, 160 with the demo model, or what fits the context)
--temperature X = 0.0: sampling temperature (default 0: greedy)
--top-k K = 0: sample among the K most likely tokens (default 0: all)
--top-p P = 1.0: sample among the fewest tokens whose probabilities add up to P (default 1: all)
--seed N = 0: random seed for sampling
--uniforms 0.1,0.7: numbers from 0 to 1 to sample with instead of the seed's, one for each token
--stop 7,8: token ids that end the text (default: the model's end tokens)
{_COMPUTING}
{_RARELY}

  bitnet-np generate --prompt "Once upon a time"
  bitnet-np generate model.gguf --tokens 1,2,3 -n 8 --temperature 0.8 --seed 3""",
    "nll": f"""Compute the mean negative log-likelihood and perplexity of a text, and the KL divergence from another model's predictions.

{_MODEL}
one of
{_TOKENS}
--kl-divergence-base F.kld: compare with another model's predictions in this file, which also has the tokens

--save-all-logits F.kld: write the predictions, by chunks, in llama.cpp's format, to compare other models with
--ctx-size N: with --save-all-logits: tokens of a chunk (default 512, or fewer for a short text or context)
--stride N: for texts longer than the context: number of tokens between the starts of windows
--out F.npy: write the negative log-likelihood of each token but the first as float64
{_COMPUTING}
{cluster_arguments("each window of a long text")}

{_RARELY}

  bitnet-np nll model.gguf --tokens-file tokens.npy
  bitnet-np nll quantised.gguf --kl-divergence-base base.kld""",
    "sweep": f"""Compute logits, likelihoods and verdicts of many models and texts, as a plan lists them.

PLAN.toml: models, tokens, and what to do with each pair
--out DIR!: folder of the results; a stopped sweep continues in its folder
--retry-failed: compute rows again that ended in ERROR or KILLED
{cluster_arguments("the rows")}

  bitnet-np sweep plan.toml --out results
  bitnet-np sweep plan.toml --out results --workers 4""",
    "grad": f"""Compute the loss of token ids and its gradients.

{_MODEL_AND_TOKENS}
--out F: write the loss and all gradients, to compare with another engine's
{_FORMAT}
{_THREADS}
{_RARELY}

  bitnet-np grad model.gguf --tokens 1,2,3
  bitnet-np grad model.gguf --tokens-file tokens.npy --out gradients.npz""",
    "convert": f"""Write a model as a GGUF file without changing a number, or refuse.

model@IN: {_A_MODEL}
{_DOWNLOAD}
OUT.gguf: the file to write
--type I2_S|TQ1_0|TQ2_0|F16|F32: type of the layers' matrices (default: unchanged; ternary matrices of a folder become I2_S)
--head F16|F32|BF16: type of the embedding and the head (default: unchanged)
--allow-rounding: allow a narrower type to round numbers and scales, and say how far logits move
--force: overwrite OUT.gguf
{_LOADING}

  bitnet-np convert folder model.gguf
  bitnet-np convert model.gguf small.gguf --type TQ2_0 --allow-rounding""",
    "vectors": f"""Write test vectors for engines in any language, and what checks them in C and Rust.

folder@DIR: a new folder
--size full|small = full: small has fewer widths, families and types
--families F1,F2,...: the families of whole models
--types T1,T2,...: the types of matrices, such as ternary, Q4_K
--operations O1,O2,...: the operations, such as rms_norm, matmul; model stands for whole models
--like MODEL: also a small model with this one's ties, biases, scalings and window; where they are not named, its family and types alone
{_DOWNLOAD}

  bitnet-np vectors pack
  bitnet-np vectors pack --size small --operations rms_norm,matmul""",
    "mask": """Print a small attention mask.

q_len@Q: number of queries
k_len@K: number of keys
--past N: number of keys before the first query's own (default K - Q)
--align bottom_right|top_left = bottom_right: corner at which the diagonal begins or ends; top_left is --past 0 and allows K < Q
--window N = 0: each query sees only the last N keys, its own included
--block N = 0: each query sees only the keys of its block of N positions
--sinks N = 0: with --window or --block: the first N keys are also visible
--prefix N = 0: every query sees the first N keys
--bool: print 1 for a visible key and 0 for a hidden one, instead of 0 and -inf

  bitnet-np mask 4 6 --window 3
  bitnet-np mask 4 4 --prefix 2 --bool""",
    "selftest": f"""Compare every kernel and small models with their known bits.

{_THREADS}
at most one of
--against contract|: compare the kernels and whole small models with the contract in plain NumPy instead of their known bits
--clear-cache: delete the compiled kernels of this installation, and do nothing else

  bitnet-np selftest
  bitnet-np selftest --against contract""",
    "completion": """Print a script that completes this command line in a shell.

shell@bash|zsh|fish: the shell

  bitnet-np completion bash > ~/.local/share/bash-completion/completions/bitnet-np
  bitnet-np completion fish > ~/.config/fish/completions/bitnet-np.fish""",
}
COMMANDS = {name: Command.of(text) for name, text in _TEXTS.items()}
