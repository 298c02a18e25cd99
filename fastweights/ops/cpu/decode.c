/* One decoding step of a model on a CPU, as a list of operations that threads run together.

   The list is made once, since all addresses are fixed (see program.py, whose structures mirror those below). Every
   thread computes its share of an operation, and a barrier separates an operation from the next. A row (the token of
   one sequence) is computed the same way whatever other rows there are, so sequences do not depend on each other.

   Shapes: x [B,K]   weight [N,K], or [2N,K] where the first half gates the second   out [B,N]
           state [B,S,d,m], [B,S,d+1,m] with a normalizer   q [B,H,r]   k [B,Hkv,r]   v [B,Hkv,d]
           keys, values of a window [B,Hkv,w,d], sinks included                         float32, unless it says otherwise
*/

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

/* Elements that rows are padded to, of which two groups have a scale each in int8. */
#define BLOCK 64
#define GROUP 32
/* Rows of a weight that are multiplied at once, so that x is loaded once for all of them. */
#define TILE 4
#define LARGEST_INT8 127.0f
#define SHIFT 128
/* Elements of a vector, and how many bytes before their use weights are asked for. */
#define LANES 16
#define AHEAD 2048

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));

enum { LINEAR, MIX };
enum { FLOAT32, BFLOAT16, INT8 };
enum { NO_NORM, RMS_NORM, LAYER_NORM };
enum { NONE, SILU, GELU, GELU_TANH, RELU };
enum { NO_RULE = -1, ADD, GATED, DELTA, DECAY, GATED_DELTA };

typedef struct {
    const float *x;
    const void *weight;  /* tiles of rows, of float32, bfloat16, or unsigned int8 with 128 added: see products_int8 */
    const uint16_t *scales; /* of int8, in bfloat16 */
    const float *bias, *norm_weight, *norm_bias;
    float *out;
    int64_t x_stride, out_stride, columns, k, weights, norm, activation, gated, add;
    double eps;
} Linear;

/* Queries, keys and values of a rule or of a window, and what rotates them. */
typedef struct {
    const float *q, *k, *v;
    const float *cos, *signed_sin; /* factors of RoPE [B,H+Hkv,r]; NULL: none */
    int64_t stride;           /* of q, k and v from one sequence to the next */
    int64_t heads, kv_heads, width, pairs;
} Heads;

typedef struct {
    Heads rule_heads, window_heads;
    float *state, *keys, *values, *out; /* out [B,H,d] */
    const float *gates[2], *key_scale, *mix;
    const int64_t *positions;
    int64_t rule, states, m, d, normalize, unit;
    int64_t gate_stride, mix_stride;
    int64_t window, sinks; /* places of a ring buffer, sinks included; 0: no window */
    double softcap;        /* 0: none */
    double unit_epsilon, smallest_divisor, smallest_logit;
} Mix;

typedef struct {
    int64_t kind;
    const void *arguments;
} Operation;

/* The sequences of this step, and which of the threads this is. */
typedef struct {
    const int64_t *rows;
    int64_t count, thread, threads;
    char *scratch;
} Share;

/* functions of one element */

/* Cephes' polynomial, which a compiler can vectorize. NaN stays NaN. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p * r, r, r) + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

static inline float activate(float x, int64_t kind) {
    switch (kind) {
    case SILU: return x * sigmoid(x);
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.707106781f));
    case GELU_TANH: return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x)); /* (1 + tanh y) / 2 = sigmoid 2y */
    case RELU: return x < 0.0f ? 0.0f : x;
    default: return x;
    }
}

static inline float from_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

static inline float dot(const float *a, const float *b, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* This thread's part [first, last) of n items, in multiples of `unit`. */
static inline void part(const Share *share, int64_t n, int64_t unit, int64_t *first, int64_t *last) {
    int64_t units = (n + unit - 1) / unit;
    *first = units * share->thread / share->threads * unit;
    *last = units * (share->thread + 1) / share->threads * unit;
    *last = *last < n ? *last : n;
}

static inline int64_t padded(int64_t k) { return (k + BLOCK - 1) / BLOCK * BLOCK; }

/* a linear layer */

static void normalize(const Linear *a, const float *x, float *y) {
    float mean = 0.0f, square = 0.0f;
    int64_t k = a->k;
    if (a->norm == NO_NORM) {
        memcpy(y, x, k * sizeof *x);
        return;
    }
    if (a->norm == LAYER_NORM) {
#pragma omp simd reduction(+ : mean)
        for (int64_t i = 0; i < k; i++) mean += x[i];
        mean /= k;
    }
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < k; i++) square += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / sqrtf(square / k + (float)a->eps);
#pragma omp simd
    for (int64_t i = 0; i < k; i++) y[i] = (x[i] - mean) * scale * a->norm_weight[i];
    if (a->norm_bias)
        for (int64_t i = 0; i < k; i++) y[i] += a->norm_bias[i];
}

/* x rounded to int8 in groups: x = numbers * scale. */
typedef struct {
    int8_t *numbers;  /* [Kp] */
    float *scales;    /* [Kp/GROUP] */
    int32_t *offsets; /* [Kp/4]: what the 128 added to the weights adds to each sum of four products, negated */
} Rounded;

static void round_groups(const float *x, int64_t groups, Rounded to) {
    for (int64_t g = 0; g < groups; g++) {
        const float *values = x + g * GROUP;
        float largest = 0.0f, poison = 0.0f;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < GROUP; i++) largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
#pragma omp simd reduction(+ : poison)
        for (int64_t i = 0; i < GROUP; i++) poison += values[i] * 0.0f; /* NaN and infinity become NaN */
        float inverse = largest > 0.0f ? LARGEST_INT8 / largest : 0.0f;
        to.scales[g] = largest / LARGEST_INT8 + poison;
        int8_t *numbers = to.numbers + g * GROUP;
#pragma omp simd
        for (int64_t i = 0; i < GROUP; i++) numbers[i] = (int8_t)(int32_t)rintf(values[i] * inverse);
        for (int64_t i = 0; i < GROUP / 4; i++)
            to.offsets[g * GROUP / 4 + i] =
                -SHIFT * (numbers[4 * i] + numbers[4 * i + 1] + numbers[4 * i + 2] + numbers[4 * i + 3]);
    }
}

/* The memory that a weight's elements come from is what takes time: they are read in the order in which they are
   stored, and asked for before they are needed. */
static inline void prefetch(const void *weight) { __builtin_prefetch((const char *)weight + AHEAD); }

static inline Floats load(const float *x) {
    Floats y;
    memcpy(&y, x, sizeof y);
    return y;
}

static inline float total(Floats x) {
    float values[LANES], sum = 0.0f;
    memcpy(values, &x, sizeof x);
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < LANES; i++) sum += values[i];
    return sum;
}

/* Products of a tile of a weight's rows with x [Kp] or its rounded form. A tile is stored as [Kp/BLOCK,TILE,BLOCK], and
   its scales as [Kp/BLOCK,TILE,2]. */
static inline void products_int8(const uint8_t *w, const uint16_t *scales, Rounded x, int64_t blocks, float *y) {
#ifdef __AVX512VNNI__
    __m512 sums[TILE];
    __m512i chosen[TILE]; /* the scales of a row's two groups, each for half a vector */
    for (int t = 0; t < TILE; t++) {
        sums[t] = _mm512_setzero_ps();
        chosen[t] = _mm512_inserti64x4(_mm512_set1_epi32(2 * t), _mm256_set1_epi32(2 * t + 1), 1);
    }
    for (int64_t b = 0; b < blocks; b++, scales += 2 * TILE) {
        __m512i numbers = _mm512_loadu_si512(x.numbers + b * BLOCK);
        __m512i offset = _mm512_loadu_si512(x.offsets + b * BLOCK / 4);
        __m256i narrow = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)scales));
        double pair; /* the scales of x */
        memcpy(&pair, x.scales + 2 * b, sizeof pair);
        __m256 both = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(narrow, 16)),
                                    _mm256_castpd_ps(_mm256_set1_pd(pair)));
        for (int t = 0; t < TILE; t++, w += BLOCK) {
            prefetch(w);
            __m512 products = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(offset, _mm512_loadu_si512(w), numbers));
            __m512 scale = _mm512_permutexvar_ps(chosen[t], _mm512_castps256_ps512(both));
            sums[t] = _mm512_fmadd_ps(products, scale, sums[t]);
        }
    }
    for (int t = 0; t < TILE; t++) y[t] = _mm512_reduce_add_ps(sums[t]);
#else
    for (int t = 0; t < TILE; t++) y[t] = 0.0f;
    for (int64_t b = 0; b < blocks; b++) {
        for (int t = 0; t < TILE; t++) {
            prefetch(w);
            for (int64_t half = 0; half < 2; half++, w += GROUP) {
                const int8_t *numbers = x.numbers + b * BLOCK + half * GROUP;
                int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < GROUP; i++) sum += ((int32_t)w[i] - SHIFT) * numbers[i];
                y[t] += sum * (from_bfloat16(scales[(b * TILE + t) * 2 + half]) * x.scales[2 * b + half]);
            }
        }
    }
#endif
}

static inline void products_bfloat16(const uint16_t *w, const float *x, int64_t blocks, float *y) {
    Floats sums[TILE] = {{0}};
    for (int64_t b = 0; b < blocks; b++)
_Pragma("GCC unroll 4")
        for (int t = 0; t < TILE; t++)
_Pragma("GCC unroll 4")
            for (int i = 0; i < BLOCK; i += LANES, w += LANES) {
                Shorts narrow;
                Words bits;
                Floats wide;
                if (i % (2 * LANES) == 0) prefetch(w);
                memcpy(&narrow, w, sizeof narrow);
                bits = __builtin_convertvector(narrow, Words) << 16;
                memcpy(&wide, &bits, sizeof wide);
                sums[t] += wide * load(x + b * BLOCK + i);
            }
    for (int t = 0; t < TILE; t++) y[t] = total(sums[t]);
}

static inline void products_float32(const float *w, const float *x, int64_t blocks, float *y) {
    Floats sums[TILE] = {{0}};
    for (int64_t b = 0; b < blocks; b++)
_Pragma("GCC unroll 4")
        for (int t = 0; t < TILE; t++)
_Pragma("GCC unroll 4")
            for (int i = 0; i < BLOCK; i += LANES, w += LANES) {
                prefetch(w);
                sums[t] += load(w) * load(x + b * BLOCK + i);
            }
    for (int t = 0; t < TILE; t++) y[t] = total(sums[t]);
}

static inline void products(const Linear *a, int64_t row, const float *x, Rounded rounded, float *y) {
    int64_t kp = padded(a->k), blocks = kp / BLOCK;
    if (a->weights == INT8)
        products_int8((const uint8_t *)a->weight + row * kp, a->scales + row * (kp / GROUP), rounded, blocks, y);
    else if (a->weights == BFLOAT16)
        products_bfloat16((const uint16_t *)a->weight + row * kp, x, blocks, y);
    else
        products_float32((const float *)a->weight + row * kp, x, blocks, y);
}

static void run_linear(const Linear *a, const Share *share) {
    int64_t kp = padded(a->k), columns = a->columns, padded_columns = (columns + TILE - 1) / TILE * TILE, first, last;
    /* scratch: x normalized [B,Kp]; for int8, also rounded */
    float *x = (float *)share->scratch;
    float *scales = x + share->count * kp;
    int32_t *offsets = (int32_t *)(scales + share->count * (kp / GROUP));
    int8_t *numbers = (int8_t *)(offsets + share->count * (kp / 4));
    part(share, columns, TILE, &first, &last);
    if (first >= last) return;
    /* every thread prepares all of x, which is less work than waiting for each other */
    for (int64_t r = 0; r < share->count; r++) {
        normalize(a, a->x + share->rows[r] * a->x_stride, x + r * kp);
        memset(x + r * kp + a->k, 0, (kp - a->k) * sizeof *x);
        if (a->weights == INT8) {
            Rounded to = {numbers + r * kp, scales + r * (kp / GROUP), offsets + r * (kp / 4)};
            round_groups(x + r * kp, kp / GROUP, to);
        }
    }
    for (int64_t n = first; n < last; n += TILE) {
        int64_t width = columns - n < TILE ? columns - n : TILE;
        for (int64_t r = 0; r < share->count; r++) {
            float y[TILE], values[TILE];
            Rounded rounded = {numbers + r * kp, scales + r * (kp / GROUP), offsets + r * (kp / 4)};
            float *out = a->out + share->rows[r] * a->out_stride + n;
            products(a, n, x + r * kp, rounded, y);
            if (a->gated) products(a, padded_columns + n, x + r * kp, rounded, values);
            for (int64_t i = 0; i < width; i++) {
                float result = a->bias ? y[i] + a->bias[n + i] : y[i];
                result = activate(result, a->activation);
                if (a->gated) result *= a->bias ? values[i] + a->bias[columns + n + i] : values[i];
                out[i] = a->add ? out[i] + result : result;
            }
        }
    }
}

/* a rule and a window */

static void rotate(const Heads *h, int64_t row, int64_t head, const float *x, float *y) {
    int64_t n = h->pairs, offset = (row * (h->heads + h->kv_heads) + head) * h->width;
    if (!h->cos) {
        memcpy(y, x, h->width * sizeof *x);
        return;
    }
    const float *cos = h->cos + offset, *signed_sin = h->signed_sin + offset;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        y[i] = x[i] * cos[i] + x[n + i] * signed_sin[i];
        y[n + i] = x[n + i] * cos[n + i] + x[i] * signed_sin[n + i];
    }
    memcpy(y + 2 * n, x + 2 * n, (h->width - 2 * n) * sizeof *x);
}

static void to_unit_length(float *x, int64_t n, float epsilon) {
    float scale = 1.0f / sqrtf(dot(x, x, n) + epsilon);
    for (int64_t i = 0; i < n; i++) x[i] *= scale;
}

/* Update state s of a sequence and read it for the `group` queries of that state, into y [group,d]. */
static void run_rule(const Mix *a, int64_t row, int64_t s, int64_t group, float *scratch, float *y) {
    const Heads *h = &a->rule_heads;
    int64_t m = a->m, d = a->d, height = d + a->normalize, kv = s * h->kv_heads / a->states;
    int deltas = a->rule == DELTA || a->rule == GATED_DELTA;
    float *k = scratch, *f = k + m, *q = f + m; /* q [group,m] */
    const float *v = h->v + row * h->stride + kv * d, *z = NULL;
    float *state = a->state + (row * a->states + s) * height * m;
    float smallest = (float)a->smallest_logit, share = 1.0f, keep = 1.0f, key_share = 1.0f;

    rotate(h, row, h->heads + kv, h->k + row * h->stride + kv * h->width, k);
    if (a->unit) to_unit_length(k, m, (float)a->unit_epsilon);
    if (a->key_scale)
        for (int64_t j = 0; j < m; j++) k[j] *= a->key_scale[s * m + j];
    for (int64_t i = 0; i < group; i++) {
        int64_t head = s * group + i;
        rotate(h, row, head, h->q + row * h->stride + head * h->width, q + i * m);
        if (a->unit) to_unit_length(q + i * m, m, (float)a->unit_epsilon);
    }
    for (int64_t j = 0; j < m; j++) f[j] = 1.0f;
    if (a->rule == DECAY || a->rule == GATED_DELTA) {
        const float *logit = a->gates[0] + row * a->gate_stride + s * m;
#pragma omp simd
        for (int64_t j = 0; j < m; j++) f[j] = sigmoid(logit[j] < smallest ? smallest : logit[j]);
    }
    if (a->rule == DECAY) z = a->gates[1] + row * a->gate_stride + s * d;
    if (a->rule == GATED) {
        float logit = a->gates[0][row * a->gate_stride + s];
        logit = logit < smallest ? smallest : logit;
        keep = sigmoid(logit), key_share = sigmoid(-logit);
        for (int64_t j = 0; j < m; j++) f[j] = keep, k[j] *= key_share;
    }
    if (deltas) share = sigmoid(a->gates[a->rule == GATED_DELTA][row * a->gate_stride + s]);

    for (int64_t i = 0; i < d; i++) {
        float *values = state + i * m, scale = z ? sigmoid(z[i] < smallest ? smallest : z[i]) : 1.0f, found = 0.0f;
        if (a->rule != ADD && a->rule != DELTA) {
#pragma omp simd
            for (int64_t j = 0; j < m; j++) values[j] *= f[j] * scale;
        }
        if (deltas) found = dot(values, k, m);
        float change = share * (v[i] - found);
#pragma omp simd
        for (int64_t j = 0; j < m; j++) values[j] += change * k[j];
        for (int64_t g = 0; g < group; g++) y[g * d + i] = dot(values, q + g * m, m);
    }
    if (!a->normalize) return;
    float *total = state + d * m, limit = (float)a->smallest_divisor;
#pragma omp simd
    for (int64_t j = 0; j < m; j++) total[j] = total[j] * keep + k[j];
    for (int64_t g = 0; g < group; g++) {
        float divisor = dot(total, q + g * m, m);
        divisor = fabsf(divisor) < limit ? copysignf(limit, divisor) : divisor;
        for (int64_t i = 0; i < d; i++) y[g * d + i] /= divisor;
    }
}

/* Attend to a window with one head, into y [d]. The first head of a group writes the new key and value. */
static void run_window(const Mix *a, int64_t row, int64_t head, float *scratch, float *y) {
    const Heads *h = &a->window_heads;
    int64_t d = a->d, width = a->window, group = h->heads / h->kv_heads, kv = head / group, token = a->positions[row];
    int64_t ring = width - a->sinks, place = token < a->sinks ? token : a->sinks + (token - a->sinks) % ring;
    int64_t filled = token + 1 < width ? token + 1 : width;
    float *k = scratch, *q = k + h->width, *weights = q + h->width, largest = -INFINITY, sum = 0.0f;
    const float *v = h->v + row * h->stride + kv * d;
    float *keys = a->keys + (row * h->kv_heads + kv) * width * d;
    float *values = a->values + (row * h->kv_heads + kv) * width * d;

    rotate(h, row, h->heads + kv, h->k + row * h->stride + kv * h->width, k);
    rotate(h, row, head, h->q + row * h->stride + head * h->width, q);
    /* Other threads may be writing the new key and value: each head uses its own copy of them. */
    for (int64_t t = 0; t < filled; t++) weights[t] = dot(q, t == place ? k : keys + t * d, d);
    if (a->softcap != 0.0)
        for (int64_t t = 0; t < filled; t++) weights[t] = (float)a->softcap * tanhf(weights[t] / (float)a->softcap);
    for (int64_t t = 0; t < filled; t++) largest = weights[t] > largest ? weights[t] : largest;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < filled; t++) {
        weights[t] = exponential(weights[t] - largest);
        sum += weights[t];
    }
    for (int64_t i = 0; i < d; i++) y[i] = 0.0f;
    for (int64_t t = 0; t < filled; t++) {
        const float *value = t == place ? v : values + t * d;
        float weight = weights[t] / sum;
#pragma omp simd
        for (int64_t i = 0; i < d; i++) y[i] += weight * value[i];
    }
    if (head % group == 0) {
        memcpy(keys + place * d, k, d * sizeof *k);
        memcpy(values + place * d, v, d * sizeof *v);
    }
}

static void run_mix(const Mix *a, const Share *share) {
    int64_t heads = a->window ? a->window_heads.heads : a->rule_heads.heads, d = a->d, first, last;
    int64_t items = a->rule == NO_RULE ? heads : a->states, group = heads / items;
    float *from_window = (float *)share->scratch, *scratch = from_window + padded(d);
    part(share, share->count * items, 1, &first, &last);
    for (int64_t item = first; item < last; item++) {
        int64_t row = share->rows[item / items], s = item % items;
        float *y = a->out + (row * heads + s * group) * d;
        if (a->rule != NO_RULE) run_rule(a, row, s, group, scratch, y);
        for (int64_t g = 0; a->window && g < group; g++, y += d) {
            int64_t head = s * group + g;
            if (a->rule == NO_RULE) {
                run_window(a, row, head, scratch, y);
                continue;
            }
            run_window(a, row, head, scratch, from_window);
            float window_share = sigmoid(a->mix[row * a->mix_stride + head]);
            for (int64_t i = 0; i < d; i++) y[i] += window_share * (from_window[i] - y[i]);
        }
    }
}

/* Run operations for some rows of the batch. scratch has scratch_size bytes for each thread. */
void run(const Operation *operations, int64_t count, const int64_t *rows, int64_t row_count, char *scratch,
         int64_t scratch_size, int64_t threads) {
#ifdef _OPENMP
#pragma omp parallel num_threads((int)threads)
#endif
    {
        Share share = {rows, row_count, 0, 1, scratch};
#ifdef _OPENMP
        share.thread = omp_get_thread_num(), share.threads = omp_get_num_threads();
        share.scratch += share.thread * scratch_size;
#endif
        for (int64_t i = 0; i < count; i++) {
            if (operations[i].kind == LINEAR) run_linear(operations[i].arguments, &share);
            else run_mix(operations[i].arguments, &share);
#ifdef _OPENMP
#pragma omp barrier
#endif
        }
    }
}
