/* A small engine's operations under test vectors. With an argument the engine has a bug: epsilon outside of the root.

   bitnet-np vectors vectors --size small
   cc -std=c99 -Ivectors engine.c -o engine -lm && ./engine */
#include "vectors.h"

static int outside; /* the bug */

static void rms_norm(float *y, const float *x, const float *gain, float eps, size_t rows, size_t width) {
    for (size_t t = 0; t < rows; t++, x += width, y += width) {
        float sum = 0;
        for (size_t i = 0; i < width; i++) sum += x[i] * x[i];
        float mean = sum / (float)width, root = outside ? sqrtf(mean) + eps : sqrtf(mean + eps);
        for (size_t i = 0; i < width; i++) y[i] = x[i] / root * gain[i];
    }
}

static void silu_gate(float *y, const float *gate, const float *up, size_t count) {
    for (size_t i = 0; i < count; i++) y[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

static void matmul(float *y, const float *x, const float *w, size_t rows, size_t n, size_t m) {
    for (size_t t = 0; t < rows; t++)
        for (size_t j = 0; j < n; j++) {
            float sum = 0;
            for (size_t i = 0; i < m; i++) sum += x[t * m + i] * w[j * m + i];
            y[t * n + j] = sum;
        }
}

static int engine(const vec_case *c, void *user) {
    (void)user;
    float *y = vec_out(c, "y");
    const vec_array *x = vec_get(c, "x");
    if (!strcmp(c->operation, "rms_norm"))
        rms_norm(y, vec_f32(c, "x"), vec_f32(c, "gain"), (float)vec_num(c, "eps", 0), x->shape[0], x->shape[1]);
    else if (!strcmp(c->operation, "silu_gate"))
        silu_gate(y, vec_f32(c, "gate"), vec_f32(c, "up"), vec_get(c, "gate")->count);
    else if (!strcmp(c->operation, "matmul") && vec_f32(c, "w"))
        matmul(y, vec_f32(c, "x"), vec_f32(c, "w"), x->shape[0], vec_get(c, "w")->shape[0], x->shape[1]);
    else
        return VEC_SKIP;
    return VEC_DONE;
}

int main(int n, char **arguments) {
    (void)arguments;
    outside = n > 1;
    FILE *junit = fopen("junit.xml", "w");
    int failed = vec_run("vectors", "", engine, NULL, stdout, junit);
    if (junit) fclose(junit);
    return failed != 0;
}
