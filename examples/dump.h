/* Writes tensors as .npy files that `bitnet-np check` reads. C99 and C++; copy this file into your engine, it needs nothing else.
 *
 *     dump_open("dump");                                              // once: makes the folder if it is not there
 *     dump_f32("attn_norm", layer, x, tokens, width);                 // dump/attn_norm-3.npy, float32 [tokens, width], row by row
 *     dump_f32("result_output", -1, logits, tokens, vocabulary);      // -1: a tensor of the whole model: dump/result_output.npy
 *
 * While an engine decodes, it computes the rows of a tensor one after another. Give each call's rows the number of the step:
 *
 *     dump_step(step);                                                // 0 for the prompt, then 1, 2, ... for each decoded token
 *     dump_f32("attn_norm", layer, x, 1, width);                      // dump/attn_norm-3.step-17.npy
 *
 * The functions return 0, and -1 if a file could not be written. They are not for several threads at once.
 */
#ifndef BITNET_NP_DUMP_H
#define BITNET_NP_DUMP_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#ifdef _WIN32
#include <direct.h>
#else
#include <sys/stat.h>
#endif

static char dump_folder[1024] = "dump";
static long dump_number = -1;

static inline int dump_open(const char *folder) {
    if (strlen(folder) >= sizeof dump_folder) return -1;
    strcpy(dump_folder, folder);
    dump_number = -1;
#ifdef _WIN32
    _mkdir(folder);
#else
    mkdir(folder, 0777);
#endif
    return 0;
}

static inline void dump_step(long step) { dump_number = step; }

/* One array of numbers of `size` bytes. dtype: as NumPy writes it, "<f4" or "<f2", "|i1" or "<i4", for a little-endian machine. */
static inline int dump_array(const char *name, int layer, const void *x, const char *dtype, size_t size, size_t rows, size_t width) {
    char path[1280], number[16] = "", step[32] = "", header[128];
    if (layer >= 0) snprintf(number, sizeof number, "-%d", layer);
    if (dump_number >= 0) snprintf(step, sizeof step, ".step-%ld", dump_number);
    int n = snprintf(path, sizeof path, "%s/%s%s%s.npy", dump_folder, name, number, step);
    if (n < 0 || (size_t)n >= sizeof path) return -1;
    n = snprintf(header, sizeof header, "{'descr': '%s', 'fortran_order': False, 'shape': (%llu, %llu)}", dtype,
                 (unsigned long long)rows, (unsigned long long)width);
    if (n < 0 || (size_t)n >= sizeof header) return -1;
    memset(header + n, ' ', 117 - (size_t)n); /* the data begin at byte 128 */
    header[117] = '\n';
    FILE *file = fopen(path, "wb");
    if (!file) return -1;
    const unsigned char start[10] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, 118, 0};
    int fine = fwrite(start, 1, 10, file) == 10 && fwrite(header, 1, 118, file) == 118;
    fine = fine && fwrite(x, size, rows * width, file) == rows * width;
    return fclose(file) == 0 && fine ? 0 : -1;
}

static inline int dump_f32(const char *name, int layer, const float *x, size_t rows, size_t width) {
    return dump_array(name, layer, x, "<f4", sizeof *x, rows, width);
}

/* Codes of activations, such as attn_norm_codes. */
static inline int dump_i8(const char *name, int layer, const int8_t *x, size_t rows, size_t width) {
    return dump_array(name, layer, x, "|i1", sizeof *x, rows, width);
}

/* The token ids, so that the dump says what it is of: dump_i32("tokens", -1, ids, 1, count). */
static inline int dump_i32(const char *name, int layer, const int32_t *x, size_t rows, size_t width) {
    return dump_array(name, layer, x, "<i4", sizeof *x, rows, width);
}

#endif
