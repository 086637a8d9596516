/* A small engine in C for the hunt: a Llama of float32 weights. With -DTAIL the product drops what is left of a row behind its last 16 numbers.

   cc -O2 -shared -fPIC engine.c -o engine.so -lm */
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int layers, width, ffn, heads, kv_heads, head_dim, vocab; float eps, base; } shape;

static void matmul(float *y, const float *x, const float *w, int n, int m) { /* [n, m] times [m] */
#ifdef TAIL
    int end = m / 16 * 16;
#else
    int end = m;
#endif
    for (int j = 0; j < n; j++, w += m) {
        y[j] = 0;
        for (int i = 0; i < end; i++) y[j] += w[i] * x[i];
    }
}

static void norm(float *y, const float *x, const float *gain, int n, float eps) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    for (int i = 0; i < n; i++) y[i] = x[i] / sqrtf(sum / n + eps) * gain[i];
}

static void rotate(float *x, int heads, int head_dim, int at, float base) { /* pairs (2i, 2i + 1) */
    for (int i = 0; i < heads * head_dim; i += 2) {
        double angle = at * pow(base, -(double)(i % head_dim) / head_dim), a = x[i], b = x[i + 1];
        x[i] = (float)(a * cos(angle) - b * sin(angle)), x[i + 1] = (float)(a * sin(angle) + b * cos(angle));
    }
}

/* Logits [count, vocab] of tokens at positions past, past + 1, ... keys, values: [layers, positions, kv_heads * head_dim], kept between calls.
   w: embedding, last norm and head; then nine for each layer: attn_norm, attn_q, attn_k, attn_v, attn_output, ffn_norm, gate, up, down. */
void engine(const shape *s, const float *const *w, const int *tokens, int count, int past, int positions, float *keys, float *values, float *logits) {
    int d = s->width, k = s->head_dim, q_width = s->heads * k, kv_width = s->kv_heads * k, big = d + q_width + s->ffn + positions;
    float *x = malloc(sizeof *x * 6 * big), *h = x + big, *q = h + big, *y = q + big, *up = y + big, *score = up + big;
    for (int t = past; t < past + count; t++) {
        memcpy(x, w[0] + (size_t)tokens[t - past] * d, sizeof *x * d);
        for (int n = 0; n < s->layers; n++) {
            const float *const *l = w + 3 + 9 * n;
            float *key = keys + (size_t)n * positions * kv_width, *value = values + (size_t)n * positions * kv_width;
            norm(h, x, l[0], d, s->eps), matmul(q, h, l[1], q_width, d);
            matmul(key + t * kv_width, h, l[2], kv_width, d), matmul(value + t * kv_width, h, l[3], kv_width, d);
            rotate(q, s->heads, k, t, s->base), rotate(key + t * kv_width, s->kv_heads, k, t, s->base);
            memset(y, 0, sizeof *y * q_width);
            for (int a = 0; a < s->heads; a++) {
                int of = a / (s->heads / s->kv_heads) * k;
                float most = -INFINITY, sum = 0;
                for (int j = 0; j <= t; j++) {
                    score[j] = 0;
                    for (int i = 0; i < k; i++) score[j] += q[a * k + i] * key[j * kv_width + of + i];
                    most = fmaxf(most, score[j] /= sqrtf((float)k));
                }
                for (int j = 0; j <= t; j++) sum += score[j] = expf(score[j] - most);
                for (int j = 0; j <= t; j++)
                    for (int i = 0; i < k; i++) y[a * k + i] += score[j] / sum * value[j * kv_width + of + i];
            }
            matmul(h, y, l[4], d, q_width);
            for (int i = 0; i < d; i++) x[i] += h[i];
            norm(h, x, l[5], d, s->eps), matmul(y, h, l[6], s->ffn, d), matmul(up, h, l[7], s->ffn, d);
            for (int i = 0; i < s->ffn; i++) y[i] = y[i] / (1 + expf(-y[i])) * up[i];
            matmul(h, y, l[8], d, s->ffn);
            for (int i = 0; i < d; i++) x[i] += h[i];
        }
        norm(h, x, w[1], d, s->eps), matmul(logits + (size_t)(t - past) * s->vocab, h, w[2], s->vocab, d);
    }
    free(x);
}
