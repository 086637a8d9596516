/* llama.cpp under test vectors: what its CPU backend has operations for, and whole models by its library.

   cc -std=gnu11 -Ivectors -I$LLAMA/include llama_cpp.c -o llama_cpp -L$LLAMA/lib -lllama -lggml -lggml-base -lggml-cpu -lm && ./llama_cpp
   where $LLAMA is llama.cpp's install prefix, or the folder in which llama-cpp-python was built. */
#include <strings.h>

#include "ggml-cpu.h"
#include "ggml.h"
#include "llama.h"
#include "vectors.h"

static struct ggml_context *g; /* of one case */

static int type_of(const char *name) {
    const char *other = !strncmp(name, "float", 5) ? (strcmp(name, "float32") ? "f16" : "f32") : strcmp(name, "bfloat16") ? name : "bf16";
    for (int t = 0; t < GGML_TYPE_COUNT; t++)
        if (ggml_type_name(t) && !strcasecmp(ggml_type_name(t), other)) return t;
    return -1;
}

/* An input as a tensor: rows of the case's arrays are ggml's first dimension. A matrix in blocks is bytes, and `type` says of what. */
static struct ggml_tensor *tensor(const vec_case *c, const char *name, int type) {
    const vec_array *a = vec_get(c, name);
    if (!a) return NULL;
    int64_t size[4] = {1, 1, 1, 1};
    for (int i = 0; i < a->rank; i++) size[i] = (int64_t)a->shape[a->rank - 1 - i];
    if (a->type == VEC_U8) size[0] = size[0] / (int64_t)ggml_type_size(type) * ggml_blck_size(type);
    struct ggml_tensor *t = ggml_new_tensor(g, type, 4, size);
    if (a->type != VEC_I64) memcpy(t->data, a->data, ggml_nbytes(t));
    else for (size_t i = 0; i < a->count; i++) ((int32_t *)t->data)[i] = (int32_t)((const int64_t *)a->data)[i];
    return t;
}

static struct ggml_tensor *rope(const vec_case *c, struct ggml_tensor *x) {
    struct ggml_tensor *at = ggml_new_tensor_1d(g, GGML_TYPE_I32, x->ne[2]);
    for (int i = 0; i < x->ne[2]; i++) ((int32_t *)at->data)[i] = (int32_t)vec_num(c, "start", 0) + i;
    return ggml_rope_ext(g, x, at, tensor(c, "factors", GGML_TYPE_F32), (int)vec_num(c, "width", 0), strcmp(vec_word(c, "pairs"), "halves") ? 0 : 2,
                         0, (float)vec_num(c, "base", 0), 1 / (float)vec_num(c, "scaling", 1), 0, (float)vec_num(c, "magnitude", 1), 32, 1);
}

static struct ggml_tensor *result(const vec_case *c, int type) {
    const char *op = c->operation;
    struct ggml_tensor *x = tensor(c, "x", GGML_TYPE_F32), *gain = tensor(c, "gain", GGML_TYPE_F32);
    if (!strcmp(op, "rms_norm")) return ggml_mul(g, ggml_rms_norm(g, x, (float)vec_num(c, "eps", 0)), gain);
    if (!strcmp(op, "layer_norm"))
        return ggml_add(g, ggml_mul(g, ggml_norm(g, x, (float)vec_num(c, "eps", 0)), gain), tensor(c, "bias", GGML_TYPE_F32));
    if (!strcmp(op, "silu_gate")) return ggml_swiglu_split(g, tensor(c, "gate", GGML_TYPE_F32), tensor(c, "up", GGML_TYPE_F32));
    if (!strcmp(op, "rope")) return rope(c, x);
    if (type < 0 || (!strcmp(op, "matmul") && type != GGML_TYPE_F32)) return NULL; /* it rounds the rows for all other types */
    if (!strcmp(op, "embed")) return ggml_get_rows(g, tensor(c, "w", type), tensor(c, "tokens", GGML_TYPE_I32));
    return !strcmp(op, "matmul") || !strcmp(op, "matmul_as_llama_cpp") ? ggml_mul_mat(g, tensor(c, "w", type), x) : NULL;
}

static int operation(const vec_case *c) {
    g = ggml_init((struct ggml_init_params){1 << 24, NULL, false});
    struct ggml_tensor *y = result(c, vec_word(c, "type") ? type_of(vec_word(c, "type")) : -1);
    if (y) {
        struct ggml_cgraph *graph = ggml_new_graph(g);
        ggml_build_forward_expand(graph, y);
        ggml_graph_compute_with_ctx(g, graph, 1);
        memcpy(vec_out(c, "y"), y->data, ggml_nbytes(y));
    }
    ggml_free(g);
    return y ? VEC_DONE : VEC_SKIP;
}

/* Tokens from..end of a sequence in one call; their logits are added to the output. */
static int decode(struct llama_context *context, const vec_array *ids, int from, int end, int sequence, float **out) {
    struct llama_batch batch = llama_batch_init(end - from, 0, 1);
    for (int i = from; i < end; i++, batch.n_tokens++) {
        int n = batch.n_tokens;
        batch.token[n] = ((const int32_t *)ids->data)[i], batch.pos[n] = i, batch.n_seq_id[n] = 1, batch.seq_id[n][0] = sequence, batch.logits[n] = 1;
    }
    int failed = llama_decode(context, batch), vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    if (!failed && out) memcpy(*out, llama_get_logits(context), sizeof(float) * vocab * (end - from)), *out += vocab * (end - from);
    llama_batch_free(batch);
    return failed ? 3 : VEC_DONE;
}

static int model(const vec_case *c, const char *folder) {
    int type = type_of(vec_word(c, "type")), rounded = !strcmp(c->operation, "model_as_llama_cpp"), failed = VEC_DONE;
    if (!vec_word(c, "gguf") || c->n_outs > 2 || (!rounded && type != GGML_TYPE_F32 && type != GGML_TYPE_F16)) return VEC_SKIP;
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, vec_word(c, "gguf"));
    struct llama_model *m = llama_model_load_from_file(path, llama_model_default_params());
    if (!m) return VEC_SKIP; /* a family or a type that it does not know */
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = 128, p.n_batch = p.n_ubatch = 64, p.n_seq_max = 2, p.n_threads = p.n_threads_batch = 1;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED, p.type_k = p.type_v = GGML_TYPE_F32;
    struct llama_context *context = llama_init_from_model(m, p);
    const vec_array *ids = vec_get(c, "tokens"), *other = vec_get(c, "tokens_2"), *chunks = vec_get(c, "chunks");
    float *out = vec_out(c, "logits"), *out_2 = vec_out(c, "logits_2");
    int prefix = vec_get(c, "prefix") ? ((const int32_t *)vec_get(c, "prefix")->data)[0] : 0, at = 0;
    if (!context) failed = 4;
    else if (prefix) {
        failed = decode(context, ids, 0, (int)ids->count, 0, NULL);
        llama_memory_seq_rm(llama_get_memory(context), 0, prefix, -1);
        failed |= decode(context, other, prefix, (int)other->count, 0, &out);
    } else if (chunks)
        for (size_t i = 0; i < chunks->count && !failed; at += ((const int32_t *)chunks->data)[i++])
            failed = decode(context, ids, at, at + ((const int32_t *)chunks->data)[i], 0, &out);
    else failed = decode(context, ids, 0, (int)ids->count, 0, &out);
    if (!failed && out_2) failed = decode(context, other, 0, (int)other->count, 1, &out_2);
    if (context) llama_free(context);
    llama_model_free(m);
    return failed;
}

static int engine(const vec_case *c, void *folder) { return strncmp(c->operation, "model", 5) ? operation(c) : model(c, folder); }
static void silent(enum ggml_log_level level, const char *text, void *data) { (void)level, (void)text, (void)data; }

int main(int n, char **arguments) {
    char *folder = n > 1 ? arguments[1] : "vectors";
    llama_log_set(silent, NULL);
    return vec_run(folder, "", engine, folder, stdout, NULL) != 0;
}
