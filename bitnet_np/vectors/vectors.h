/* vectors.h: opens a pack of test vectors, hands its cases to an engine, and judges what the engine gives. C99 or C++11, no dependency.

   static int engine(const vec_case *c, void *user) {
       if (strcmp(c->operation, "rms_norm")) return VEC_SKIP;
       const vec_array *x = vec_get(c, "x");
       my_rms_norm(vec_out(c, "y"), vec_f32(c, "x"), vec_f32(c, "gain"), vec_num(c, "eps", 0), x->shape[0], x->shape[1]);
       return VEC_DONE;
   }
   int main(void) { return vec_run("vectors", "", engine, NULL, stdout, NULL) != 0; }

   A pack is a folder that `bitnet-np vectors` writes; its page says what each case asks and what the lines of its index mean. Outputs are
   float. They are NaN before the engine writes them, so an output that is forgotten fails. Limits are those of `bitnet-np check`: judge/ of
   bitnet_np derives them and says where they come from. What a pack holds is not trusted: a damaged one is an error. */
#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VEC_DONE = 0, VEC_SKIP = 1 }; /* what an engine returns: any other number is an error of it */
enum { VEC_F64, VEC_F32, VEC_F16, VEC_BF16, VEC_I64, VEC_I32, VEC_I8, VEC_U8 };
enum { VEC_NAME = 64, VEC_RANK = 4, VEC_ARRAYS = 500, VEC_WORDS = 8, VEC_OUTS = 66 };

typedef struct { char name[VEC_NAME]; int type, rank; size_t shape[VEC_RANK], count; const void *data; } vec_array;
typedef struct { char name[VEC_NAME], text[VEC_NAME]; } vec_word_of;
typedef struct { char name[VEC_NAME], rule[VEC_NAME]; const vec_array *value; float *numbers; } vec_output;
typedef struct {
    char id[VEC_NAME], operation[VEC_NAME];
    size_t n_arrays, n_words, n_outs;
    vec_array arrays[VEC_ARRAYS]; /* inputs by their names, those of outputs as y.value, y.limit */
    vec_word_of words[VEC_WORDS];
    vec_output outs[VEC_OUTS];
} vec_case;
typedef struct { size_t bytes; char *data; } vec_file;
typedef struct {
    char version[VEC_NAME], error[256];
    char *index, *at; /* the whole index, and what is read next */
    size_t n_files, n_cases, line;
    vec_file *files;
} vec_pack;
typedef int (*vec_engine)(const vec_case *c, void *user);

#define VEC_FAIL(p, ...) (snprintf((p)->error, sizeof (p)->error, __VA_ARGS__), -1)

/* --- what an engine asks for: each is NULL where a case has no such array --- */

static const vec_array *vec_get(const vec_case *c, const char *name) {
    for (size_t i = 0; i < c->n_arrays; i++)
        if (!strcmp(c->arrays[i].name, name)) return &c->arrays[i];
    return NULL;
}
static const float *vec_f32(const vec_case *c, const char *name) {
    const vec_array *a = vec_get(c, name);
    return a && a->type == VEC_F32 ? (const float *)a->data : NULL;
}
/* A number of the operation, such as eps; `otherwise` where the case has none. */
static double vec_num(const vec_case *c, const char *name, double otherwise) {
    const vec_array *a = vec_get(c, name);
    return a && a->type == VEC_F64 && a->rank == 0 ? *(const double *)a->data : otherwise;
}
/* An option that is no number, such as the type of a matrix; "" where the case has none. */
static const char *vec_word(const vec_case *c, const char *name) {
    size_t i = 0;
    while (i < c->n_words && strcmp(c->words[i].name, name)) i++;
    return i < c->n_words ? c->words[i].text : "";
}
/* Where the engine puts an output, in C order; its shape is that of vec_get(c, "y.value"). */
static float *vec_out(const vec_case *c, const char *name) {
    for (size_t i = 0; i < c->n_outs; i++)
        if (!strcmp(c->outs[i].name, name)) return c->outs[i].numbers;
    return NULL;
}

/* --- reading --- */

static uint64_t vec_checksum(const char *data, size_t bytes) {
    uint64_t total = 0xCBF29CE484222325u;
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, data + i, bytes - i < 8 ? bytes - i : 8);
        total = (total ^ word) * 0x100000001B3u;
    }
    return total ^ bytes;
}

/* The content of dir/name with a 0 behind it; NULL if it cannot be read. */
static char *vec_read(const char *dir, const char *name, size_t *bytes) {
    size_t length = strlen(dir) + strlen(name) + 2, room = 0, have = 0;
    char *path = (char *)malloc(length), *data = NULL;
    if (path) snprintf(path, length, "%s/%s", dir, name);
    FILE *file = path ? fopen(path, "rb") : NULL;
    free(path);
    while (file) {
        char *more = have + 1 < room ? data : (char *)realloc(data, room = 2 * room + 4096);
        if (!more) break;
        data = more;
        size_t some = fread(data + have, 1, room - have - 1, file);
        have += some;
        if (some) continue;
        if (ferror(file)) break;
        fclose(file);
        data[have] = 0, *bytes = have;
        return data;
    }
    if (file) fclose(file);
    free(data);
    return NULL;
}

/* The next word of the index into out: letters, digits and a few signs. 0 if there is one. */
static int vec_token(vec_pack *p, char out[VEC_NAME]) {
    size_t n = 0;
    while (p->at[n] && p->at[n] != ' ' && p->at[n] != '\n') {
        char c = p->at[n];
        int fine = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || strchr("_-.+/", c);
        if (!fine || n + 1 >= VEC_NAME) return VEC_FAIL(p, "vectors.txt, line %zu: no word", p->line);
        out[n++] = c;
    }
    out[n] = 0;
    p->at += n + (p->at[n] == ' ');
    return n ? 0 : VEC_FAIL(p, "vectors.txt, line %zu: a word is missing", p->line);
}
static int vec_end_of_line(vec_pack *p) {
    return *p->at == '\n' ? (p->at++, p->line++, 0) : VEC_FAIL(p, "vectors.txt, line %zu: more words than expected", p->line);
}
static int vec_size(vec_pack *p, size_t *out) {
    char word[VEC_NAME];
    if (vec_token(p, word)) return -1;
    unsigned long long total = strtoull(word, NULL, 10);
    *out = (size_t)total;
    int fine = strspn(word, "0123456789") == strlen(word) && strlen(word) <= 15 && *out == total;
    return fine ? 0 : VEC_FAIL(p, "vectors.txt, line %zu: %s is no size", p->line, word);
}
/* Whether the next word is this one, which is then passed. */
static int vec_is(vec_pack *p, const char *word) {
    size_t n = strlen(word);
    int is = !strncmp(p->at, word, n) && p->at[n] == ' ';
    if (is) p->at += n + 1;
    return is;
}

static void vec_close(vec_pack *p) {
    for (size_t i = 0; p->files && i < p->n_files; i++) free(p->files[i].data);
    free(p->files), free(p->index), p->files = NULL, p->index = NULL;
}

/* Open a pack: its index and all its files are read and their checksums compared. 0, or -1 with the reason in p->error. */
static int vec_open(vec_pack *p, const char *dir) {
    size_t bytes = 0, schema = 0, number = 0;
    char word[VEC_NAME], sum[17];
    const uint16_t one = 1;
    memset(p, 0, sizeof *p);
    p->line = 1;
    if (!*(const char *)&one) return VEC_FAIL(p, "packs are read on little-endian machines only");
    p->index = p->at = vec_read(dir, "vectors.txt", &bytes);
    if (!p->index) return VEC_FAIL(p, "%s/vectors.txt cannot be read", dir);
    if (bytes < 21 || strlen(p->index) != bytes || memcmp(p->index + bytes - 21, "end ", 4)) return VEC_FAIL(p, "%s/vectors.txt is cut short", dir);
    snprintf(sum, sizeof sum, "%016llx", (unsigned long long)vec_checksum(p->index, bytes - 21));
    if (memcmp(p->index + bytes - 17, sum, 16)) return VEC_FAIL(p, "%s/vectors.txt is damaged: its checksum is another", dir);
    if (!vec_is(p, "bitnet_np-vectors") || vec_size(p, &schema) || schema != 1) return VEC_FAIL(p, "%s/vectors.txt: no index of schema 1", dir);
    if (vec_token(p, p->version) || vec_size(p, &p->n_files) || vec_size(p, &p->n_cases) || vec_end_of_line(p)) return -1;
    p->files = p->n_files <= bytes ? (vec_file *)calloc(p->n_files + 1, sizeof *p->files) : NULL;
    if (!p->files) return VEC_FAIL(p, "vectors.txt has %zu files: too many", p->n_files);
    for (size_t i = 0; i < p->n_files; i++) {
        size_t have = 0;
        char checksum[VEC_NAME];
        if (!vec_is(p, "file") || vec_size(p, &number) || number != i) return VEC_FAIL(p, "vectors.txt, line %zu: not file %zu", p->line, i);
        if (vec_size(p, &p->files[i].bytes) || vec_token(p, checksum) || vec_token(p, word) || vec_end_of_line(p)) return -1;
        if (word[0] == '/' || strstr(word, "..")) return VEC_FAIL(p, "vectors.txt: %s is outside of the pack", word);
        p->files[i].data = vec_read(dir, word, &have);
        if (!p->files[i].data) return VEC_FAIL(p, "%s/%s cannot be read", dir, word);
        snprintf(sum, sizeof sum, "%016llx", (unsigned long long)vec_checksum(p->files[i].data, have));
        if (have != p->files[i].bytes) return VEC_FAIL(p, "%s/%s has %zu bytes, expected %zu", dir, word, have, p->files[i].bytes);
        if (strcmp(sum, checksum)) return VEC_FAIL(p, "%s/%s is damaged: its checksum is another", dir, word);
    }
    return 0;
}

static int vec_read_array(vec_pack *p, vec_array *a) {
    static const char *const names[] = {"f64", "f32", "f16", "bf16", "i64", "i32", "i8", "u8"};
    static const size_t sizes[] = {8, 4, 2, 2, 8, 4, 1, 1};
    char kind[VEC_NAME];
    size_t file, offset, rank;
    if (vec_token(p, a->name) || vec_token(p, kind) || vec_size(p, &file) || vec_size(p, &offset) || vec_size(p, &rank)) return -1;
    for (a->type = 0; a->type < 8 && strcmp(kind, names[a->type]); a->type++) {}
    if (a->type == 8 || rank > VEC_RANK || file >= p->n_files || offset % 8) return VEC_FAIL(p, "vectors.txt, line %zu: no array", p->line);
    size_t left = offset < p->files[file].bytes ? (p->files[file].bytes - offset) / sizes[a->type] : 0;
    a->rank = (int)rank, a->count = 1;
    for (size_t i = 0; i < rank; i++) {
        if (vec_size(p, &a->shape[i])) return -1;
        if (!a->shape[i] || a->shape[i] > left / a->count) left = 0, a->shape[i] = 1;
        a->count *= a->shape[i];
    }
    if (a->count > left) return VEC_FAIL(p, "vectors.txt, line %zu: %s is empty, or larger than its file", p->line, a->name);
    a->data = p->files[file].data + offset;
    return vec_end_of_line(p);
}

static const vec_array *vec_part(const vec_case *c, const vec_output *o, const char *part) {
    char name[2 * VEC_NAME];
    snprintf(name, sizeof name, "%.63s.%.63s", o->name, part);
    return vec_get(c, name);
}
static double vec_of(const vec_case *c, const vec_output *o, const char *part) { return *(const double *)vec_part(c, o, part)->data; }
static size_t vec_rows(const vec_array *a) { return a->rank ? a->shape[0] : 1; }

/* Check that an output has all that its rule reads, and make room for the engine's numbers. */
static int vec_check_output(vec_pack *p, const vec_case *c, vec_output *o) {
    static const char *const arrays[][3] = {{"bounds", "limit", "square"}, {"equal"}, {"tensor", "most"}, {"logits", "most"}};
    static const char *const numbers[][4] = {{"shared"}, {NULL}, {"mean"}, {"mean", "scale", "single", "one_scale"}};
    size_t rule = 0;
    while (rule < 4 && strcmp(o->rule, arrays[rule][0])) rule++;
    o->value = vec_part(c, o, "value");
    int fine = rule < 4 && o->value && o->value->type == (rule ? VEC_F32 : VEC_F64);
    for (size_t i = 1; fine && i < 3 && arrays[rule][i]; i++) {
        const vec_array *a = vec_part(c, o, arrays[rule][i]);
        fine = a && a->type == VEC_F64 && a->count == (rule ? vec_rows(o->value) : o->value->count);
    }
    for (size_t i = 0; fine && i < 4 && numbers[rule][i]; i++) {
        const vec_array *a = vec_part(c, o, numbers[rule][i]);
        fine = a && a->type == VEC_F64 && a->rank == 0;
    }
    if (fine) o->numbers = (float *)malloc(o->value->count * sizeof(float));
    if (!fine || !o->numbers) return VEC_FAIL(p, "case %s: output %s has not what the rule %s reads", c->id, o->name, o->rule);
    for (size_t i = 0; i < o->value->count; i++) o->numbers[i] = NAN;
    return 0;
}
static void vec_free_case(vec_case *c) {
    for (size_t i = 0; i < c->n_outs; i++) free(c->outs[i].numbers), c->outs[i].numbers = NULL;
}

/* Read the next case. 1, 0 behind the last one, or -1 with the reason in p->error. Free it with vec_free_case. */
static int vec_next(vec_pack *p, vec_case *c) {
    memset(c, 0, sizeof *c);
    if (vec_is(p, "end")) return 0;
    if (!vec_is(p, "case")) return VEC_FAIL(p, "vectors.txt, line %zu: no case", p->line);
    if (vec_token(p, c->id) || vec_token(p, c->operation) || vec_end_of_line(p)) return -1;
    for (int is_array, is_word;;) {
        if (c->n_arrays == sizeof c->arrays / sizeof *c->arrays || c->n_words == VEC_WORDS || c->n_outs == VEC_OUTS)
            return VEC_FAIL(p, "case %s has more arrays than this header has room for", c->id);
        if ((is_array = vec_is(p, "array")) != 0) {
            if (vec_read_array(p, &c->arrays[c->n_arrays++])) return -1;
        } else if ((is_word = vec_is(p, "word")) != 0 || vec_is(p, "out")) {
            char *name = is_word ? c->words[c->n_words].name : c->outs[c->n_outs].name;
            char *text = is_word ? c->words[c->n_words++].text : c->outs[c->n_outs++].rule;
            if (vec_token(p, name) || vec_token(p, text) || vec_end_of_line(p)) return -1;
        } else {
            break;
        }
    }
    for (size_t i = 0; i < c->n_outs; i++)
        if (vec_check_output(p, c, &c->outs[i])) return vec_free_case(c), -1;
    return c->n_outs ? 1 : VEC_FAIL(p, "case %s has no output", c->id);
}

/* --- judging: each returns 1 for a pass; why says what is wrong, or how near it is --- */

#define VEC_SAY(...) snprintf(why, 256, __VA_ARGS__)
static const double vec_tiny = 1.1754943508222875e-38, vec_u = 5.9604644775390625e-08;

/* One operation: a limit for each number, one for the variance of all errors, and one for a common factor (judge/bounds.py, within). */
static int vec_bounds(const vec_case *c, const vec_output *o, char *why) {
    const double *value = (const double *)o->value->data, *limit = (const double *)vec_part(c, o, "limit")->data;
    const double *square = (const double *)vec_part(c, o, "square")->data, shared = vec_of(c, o, "shared");
    double count = 0, squares = 0, along = 0, size = 0, spread = 0, worst = -1;
    size_t n = o->value->count, at = 0, wrong = 0, width = n / vec_rows(o->value);
    for (size_t i = 0; i < n; i++) {
        if (isinf(limit[i])) continue;
        double off = (double)o->numbers[i] - value[i], share = isfinite(off) ? fabs(off) / limit[i] : INFINITY;
        wrong += !(share <= 1);
        if (share > worst) worst = share, at = i;
        if (!(square[i] > 0) || !isfinite(off)) continue;
        count += 1, squares += off * off / square[i], along += off * value[i];
        size += value[i] * value[i], spread += square[i] / 3 * value[i] * value[i];
    }
    VEC_SAY("%.63s[%zu, %zu] is %.9g, expected %.9g +- %.2g: %.3g of the limit; %zu of %zu are wrong", o->name, at / width, at % width,
            (double)o->numbers[at], value[at], limit[at], worst, wrong, n);
    if (wrong) return 0;
    double variance = count > 0 ? squares / count : 0, slope = size > 0 ? along / size : 0;
    int everywhere = count > 0 && variance > 0.4 * (1 + 4 * sqrt(2 * shared / count));
    int factor = size > 0 && fabs(slope) > 6 * vec_u + 4 * sqrt(spread * shared) / size;
    if (everywhere) VEC_SAY("%.63s: errors are small but everywhere: variance %.2g of the bound's, expected at most 0.4", o->name, variance);
    else if (factor) VEC_SAY("%.63s: everything is %.9g times what it should be", o->name, 1 + slope);
    return !everywhere && !factor;
}

static int vec_equal(const vec_output *o, char *why) {
    const float *value = (const float *)o->value->data;
    size_t n = o->value->count, width = n / vec_rows(o->value);
    for (size_t i = 0; i < n; i++) {
        float y = o->numbers[i];
        if (y == value[i] || (isnan(y) && isnan(value[i]))) continue;
        return VEC_SAY("%.63s[%zu, %zu] is %.9g, expected exactly %.9g", o->name, i / width, i % width, (double)y, (double)value[i]), 0;
    }
    return VEC_SAY("%.63s: the same numbers", o->name), 1;
}

static int vec_rising(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

/* What one row of logits adds to its mean square error (judge/measures.py, _numbers and _beyond_rounding): a common factor, single logits
   that are far off, a factor and a constant alone. room: 2 * n numbers. NULL, or what is wrong. */
static const char *vec_logits_row(const vec_case *c, const vec_output *o, const float *a, const float *b, size_t n, double *room, int *beyond) {
    double mean = 0, var = 0, shift = 0, along = 0, square = 0, largest = 0, outlier = 0, left = 0, *error = room, *sorted = room + n;
    for (size_t i = 0; i < n; i++) mean += (double)a[i] / (double)n, error[i] = (double)b[i] - a[i], shift += error[i] / (double)n;
    for (size_t i = 0; i < n; i++) {
        double centred = a[i] - mean;
        var += centred * centred / (double)n, along += centred * b[i] / (double)n, square += error[i] * error[i] / (double)n;
        sorted[i] = fabs(error[i]);
        if (sorted[i] > largest) largest = sorted[i];
    }
    qsort(sorted, n, sizeof *sorted, vec_rising);
    double spread = sqrt(var), scale = var > 0 ? along / var : 1, typical = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
    for (size_t i = 0; i < n; i++) {
        double centred = fabs(a[i] - mean), fit = error[i] - shift - (scale - 1) * (a[i] - mean);
        double allowed = typical <= 1e-5 * spread ? 1e-4 * (spread > centred ? spread : centred) : vec_of(c, o, "single") * spread + centred / 10;
        left += fit * fit / (double)n;
        outlier = fmax(outlier, fabs(error[i]) / fmax(allowed, 1e-300));
    }
    *beyond |= largest > 1e-4 * spread;
    if (fabs(scale - 1) > vec_of(c, o, "scale")) return "all logits are a factor off";
    if (n >= 32 && outlier > 1) return "a single logit is far off";
    int fitted = largest > 1e-4 * spread && square > 0 && left / square < 0.01;
    return n >= 32 && vec_of(c, o, "one_scale") == 0 && fitted ? "only a factor and a constant are wrong" : NULL;
}

/* Tensors and logits of whole models: the mean square error of each row, over that of the row's own numbers, and their mean. */
static int vec_across(const vec_case *c, const vec_output *o, char *why) {
    const float *value = (const float *)o->value->data;
    const double *most = (const double *)vec_part(c, o, "most")->data;
    size_t rows = vec_rows(o->value), width = o->value->count / rows, worst = 0, wrong = 0;
    int logits = !strcmp(o->rule, "logits"), beyond = 0;
    double mean = 0, highest = 0, share = -1, *room = logits ? (double *)malloc(2 * width * sizeof(double)) : NULL;
    const char *more = logits && !room ? "no memory" : NULL;
    for (size_t t = 0; t < rows && !(logits && !room); t++) {
        const float *a = value + t * width, *b = o->numbers + t * width;
        double centre = 0, square = 0, size = 0;
        for (size_t i = 0; logits && i < width; i++) centre += (double)a[i] / (double)width;
        for (size_t i = 0; i < width; i++) {
            double error = (double)b[i] - a[i];
            if (!isfinite(b[i])) return VEC_SAY("%.63s[%zu, %zu] is %g", o->name, t, i, (double)b[i]), free(room), 0;
            square += error * error, size += (a[i] - centre) * (a[i] - centre);
        }
        double nmse = logits && !(size > 0) ? (square > 0 ? 1e300 : 0) : square / fmax(size, vec_tiny);
        mean += nmse / (double)rows, highest = fmax(highest, nmse), wrong += !(nmse <= most[t]);
        if (nmse / most[t] > share) share = nmse / most[t], worst = t;
        const char *found = logits ? vec_logits_row(c, o, a, b, width, room, &beyond) : NULL;
        if (found && !more) more = found, worst = t;
    }
    free(room);
    VEC_SAY("%.63s, row %zu: mean square error %.3g of the limit %.2g; on average %.2g, limit %.2g", o->name, worst, share, most[worst], mean,
            vec_of(c, o, "mean"));
    if (logits ? !beyond && room : highest <= 1e-9) return 1;
    if (wrong || mean > vec_of(c, o, "mean")) return 0;
    if (more) VEC_SAY("%.63s, row %zu: %.63s", o->name, worst, more);
    return !more;
}

/* Judge all outputs of a case. why: 256 characters. */
static int vec_judge(const vec_case *c, char *why) {
    int pass = 1;
    for (const vec_output *o = c->outs; pass && o < c->outs + c->n_outs; o++)
        pass = *o->rule == 'b' ? vec_bounds(c, o, why) : *o->rule == 'e' ? vec_equal(o, why) : vec_across(c, o, why);
    return pass;
}

/* Run an engine on the cases whose ids begin with `only`, and print TAP, and JUnit's XML if junit is a file. Returns the number of cases
   that failed, or -1: the pack cannot be read, or no case ran, which is no pass. */
static int vec_run(const char *dir, const char *only, vec_engine engine, void *user, FILE *tap, FILE *junit) {
    vec_pack p;
    vec_case *c = (vec_case *)malloc(sizeof *c);
    if (!c) return -1;
    int failed = 0, ran = 0, n = 0, more = vec_open(&p, dir);
    fprintf(tap, "TAP version 13\n# pack %s\n", p.version);
    if (junit) fprintf(junit, "<?xml version=\"1.0\"?>\n<testsuite name=\"vectors %s\">\n", p.version);
    for (more = more ? -1 : vec_next(&p, c); more > 0; vec_free_case(c), more = vec_next(&p, c)) {
        char why[256] = "";
        if (strncmp(c->id, only, strlen(only))) continue;
        int code = engine(c, user), pass = code == VEC_DONE && vec_judge(c, why);
        n++, ran += code != VEC_SKIP, failed += code != VEC_SKIP && !pass;
        if (code != VEC_DONE) snprintf(why, sizeof why, code == VEC_SKIP ? "not supported" : "the engine returned %d", code);
        fprintf(tap, "%s %d - %s%s%s\n", pass || code == VEC_SKIP ? "ok" : "not ok", n, c->id, code == VEC_SKIP ? " # SKIP " : pass ? " # " : "\n  # ", why);
        if (!junit) continue;
        fprintf(junit, "<testcase classname=\"%s\" name=\"%s\">%s", c->operation, c->id, code == VEC_SKIP ? "<skipped/>" : "");
        if (code != VEC_SKIP && !pass) fprintf(junit, "<failure message=\"%s\"/>", why);
        fprintf(junit, "</testcase>\n");
    }
    if (!more && !ran) more = VEC_FAIL(&p, "no case ran");
    if (more) fprintf(tap, "Bail out! %s\n", p.error);
    else fprintf(tap, "1..%d\n# %d of %d failed, %d skipped\n", n, failed, ran, n - ran);
    if (junit) fprintf(junit, more ? "<testcase name=\"pack\"><error/></testcase>\n</testsuite>\n" : "</testsuite>\n");
    vec_close(&p), free(c);
    return more ? -1 : failed;
}

#endif
