/* Square root of the sum of squares, largest magnitude, sum and number of non-zero values of rows of scalars.

   The fused pass of backlight.measure.stats.compiled_rows. Squares and sums are taken in double precision in
   LANES partial sums, whose order depends neither on the compiler nor on the number of threads. Largest
   magnitudes are compared as bits: without its sign bit a float is ordered as its bits are, infinity above all
   numbers and NaN above infinity. */

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { LANES = 16, TILE = 512, MAX_THREADS = 64, NUMBERS = 4 };

typedef struct {
    double square[LANES], sum[LANES];
    int32_t top[LANES], nonzero[LANES];
} Lanes;

typedef struct {
    int kind;
    int64_t tensors, width;
    const char *const *values;
    const int64_t *counts;
    double *out;
    atomic_llong next;
} Work;

static inline float as_float(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int32_t as_bits(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void add(const int32_t *restrict bits, int64_t count, Lanes *restrict lanes)
{
    Lanes l = *lanes;
    for (int64_t i = 0; i < count; i += LANES)
        for (int k = 0; k < LANES; k++) {
            int32_t magnitude = bits[i + k] & 0x7fffffff;
            double value = as_float(bits[i + k]);
            l.square[k] += value * value;
            l.sum[k] += value;
            l.top[k] = magnitude > l.top[k] ? magnitude : l.top[k];
            l.nonzero[k] += magnitude != 0;
        }
    *lanes = l;
}

static void widen_bfloat16(const uint16_t *restrict from, int64_t count, int32_t *restrict to)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = (int32_t)((uint32_t)from[i] << 16);
}

/* By integers and one subtraction of normal numbers, since a thread may treat subnormal ones as zero. */
static void widen_float16(const uint16_t *restrict from, int64_t count, int32_t *restrict to)
{
    for (int64_t i = 0; i < count; i++) {
        int32_t exponent = from[i] & 0x7c00, moved = ((from[i] & 0x7fff) << 13) + (112 << 23);
        int32_t small = as_bits(as_float(moved + (1 << 23)) - 0x1p-14f);
        int32_t wide = exponent == 0x7c00 ? moved + (112 << 23) : exponent == 0 ? small : moved;
        to[i] = wide | (int32_t)((uint32_t)(from[i] & 0x8000) << 16);
    }
}

static void measure_row(int kind, const char *values, int64_t count, double *out)
{
    Lanes l = {0};
    int32_t tile[TILE];
    for (int64_t i = 0; i < count; i += TILE) {
        int64_t size = count - i < TILE ? count - i : TILE;
        const int32_t *bits = tile;
        if (size < TILE)
            memset(tile, 0, sizeof tile);
        if (kind == BFLOAT16)
            widen_bfloat16((const uint16_t *)values + i, size, tile);
        else if (kind == FLOAT16)
            widen_float16((const uint16_t *)values + i, size, tile);
        else if (size < TILE)
            memcpy(tile, (const int32_t *)values + i, (size_t)size * sizeof *tile);
        else
            bits = (const int32_t *)values + i;
        add(bits, (size + LANES - 1) / LANES * LANES, &l);
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int k = 0; k < half; k++) {
            l.square[k] += l.square[k + half];
            l.sum[k] += l.sum[k + half];
            l.top[k] = l.top[k + half] > l.top[k] ? l.top[k + half] : l.top[k];
            l.nonzero[k] += l.nonzero[k + half];
        }
    out[0] = sqrt(l.square[0]);
    out[1] = as_float(l.top[0]);
    out[2] = l.sum[0];
    out[3] = l.nonzero[0];
}

/* Measure rows until none is left; threads take them one by one. */
static void *work(void *argument)
{
    Work *w = argument;
    int64_t tensor = 0, first = 0, size = w->kind == FLOAT32 ? 4 : 2;
    for (;;) {
        int64_t row = atomic_fetch_add(&w->next, 1), rows;
        while (tensor < w->tensors && row >= first + (rows = (w->counts[tensor] + w->width - 1) / w->width)) {
            first += rows;
            tensor++;
        }
        if (tensor == w->tensors)
            return NULL;
        int64_t begin = (row - first) * w->width, left = w->counts[tensor] - begin;
        measure_row(w->kind, w->values[tensor] + begin * size, left < w->width ? left : w->width,
                    w->out + row * NUMBERS);
    }
}

/* Cut tensors into rows of width scalars, the last of each shorter; out has NUMBERS doubles per row. */
void measure_rows(int kind, int64_t tensors, const char *const *values, const int64_t *counts, int64_t width,
                  int threads, double *out)
{
    Work w = {kind, tensors, width, values, counts, out, 0};
    pthread_t others[MAX_THREADS];
    int started = 0;
    sigset_t all, before;
    if (threads > 1) { /* signals are for the threads of the program */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (started < threads - 1 && started < MAX_THREADS
               && pthread_create(&others[started], NULL, work, &w) == 0)
            started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    work(&w);
    while (started)
        pthread_join(others[--started], NULL);
}
