/* Statistics of tensors on a device, and the sample of their weights, each in one launch over all tensors.

   The fused pass of backlight.measure.stats.fused_rows, compiled for the device at run time, without a header.
   A block measures one row; what its threads do between two barriers is a loop over one of them here, and over
   all of them where the tests build this source for the host. Sums are taken in double precision in an order
   that depends on the row alone, as in rows.c: a GPU with one unit for it per 64 others does the three operations
   of a scalar in about twice the time in which its memory delivers that scalar. */

#ifndef EACH_THREAD
#define EACH_THREAD for (int t = threadIdx.x, left = 1; left; left = 0)
#endif

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { THREADS = 256, ROW = 65536, VECTOR_BYTES = 16 };

/* Every step-th of the scalars from an address on, count in all, which begin in a row of the results. */
struct Entry {
    long long address, kind, step, count, row;
};

struct Partial {
    double square, sum;
    unsigned top, nonzero, nan, inf;
};

static __device__ const Entry *entry_of(const Entry *table, long long entries, long long row)
{
    long long low = 0, high = entries - 1;
    while (low < high) {
        long long middle = (low + high + 1) / 2;
        if (table[middle].row <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return table + low;
}

/* Return the bits of a 16-bit value as float32. */
static __device__ unsigned widened(unsigned half, long long kind)
{
    unsigned sign = (half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (kind == BFLOAT16)
        return half << 16;
    if (magnitude < 0x400) /* subnormal, in units of 2^-24 */
        return sign | __float_as_uint((float)magnitude * 5.9604644775390625e-8f);
    return sign | ((magnitude << 13) + ((magnitude < 0x7c00 ? 112u : 224u) << 23));
}

static __device__ unsigned bits_at(const char *values, long long kind, long long index)
{
    if (kind == FLOAT32)
        return ((const unsigned *)values)[index];
    return widened(((const unsigned short *)values)[index], kind);
}

static __device__ void add(Partial *p, unsigned bits)
{
    unsigned magnitude = bits & 0x7fffffff;
    double value = __uint_as_float(bits);
    p->square += value * value;
    p->sum += value;
    p->top = magnitude > p->top ? magnitude : p->top;
    p->nonzero += magnitude != 0;
    p->nan += magnitude > 0x7f800000;
    p->inf += magnitude == 0x7f800000;
}

/* Write norm, largest magnitude, sum, and numbers of non-zero, NaN and infinite values of each row. */
extern "C" __global__ void measure_rows(const Entry *table, long long entries, double *out, long long rows)
{
    __shared__ Partial partials[THREADS];
    const long long row = blockIdx.x;
    const Entry e = *entry_of(table, entries, row);
    const long long size = e.kind == FLOAT32 ? 4 : 2, begin = (row - e.row) * ROW;
    const long long count = e.count - begin < ROW ? e.count - begin : ROW, width = VECTOR_BYTES / size;
    const char *values = (const char *)e.address + begin * size;
    const bool is_aligned = (unsigned long long)values % VECTOR_BYTES == 0;
    EACH_THREAD {
        Partial p = {};
        for (long long first = t * width; first < count; first += THREADS * width) {
            if (is_aligned && first + width <= count) {
                const uint4 vector = *(const uint4 *)(values + first * size);
                const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
                for (int k = 0; k < 4; k++)
                    if (e.kind == FLOAT32) {
                        add(&p, words[k]);
                    } else {
                        add(&p, widened(words[k] & 0xffff, e.kind));
                        add(&p, widened(words[k] >> 16, e.kind));
                    }
            } else {
                for (long long i = first; i < first + width && i < count; i++)
                    add(&p, bits_at(values, e.kind, i));
            }
        }
        partials[t] = p;
    }
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        EACH_THREAD if (t < half) {
            Partial *p = partials + t, *other = p + half;
            p->square += other->square;
            p->sum += other->sum;
            p->top = other->top > p->top ? other->top : p->top;
            p->nonzero += other->nonzero;
            p->nan += other->nan;
            p->inf += other->inf;
        }
        __syncthreads();
    }
    EACH_THREAD if (t == 0) {
        out[row] = sqrt(partials->square);
        out[rows + row] = __uint_as_float(partials->top);
        out[2 * rows + row] = partials->sum;
        out[3 * rows + row] = partials->nonzero;
        out[4 * rows + row] = partials->nan;
        out[5 * rows + row] = partials->inf;
    }
}

/* Write the sum of the words of each row, as signed integers that wrap around, and that of its squares. */
extern "C" __global__ void digest_rows(const Entry *table, long long entries, long long *digests, double *squares)
{
    __shared__ unsigned words[THREADS];
    __shared__ double parts[THREADS];
    const long long row = blockIdx.x;
    const Entry e = *entry_of(table, entries, row);
    const long long begin = (row - e.row) * ROW, count = e.count - begin < ROW ? e.count - begin : ROW;
    EACH_THREAD {
        unsigned sum = 0;
        double square = 0;
        for (long long i = begin + t; i < begin + count; i += THREADS) {
            const unsigned bits = bits_at((const char *)e.address, e.kind, i);
            const double value = __uint_as_float(bits);
            sum += e.kind == FLOAT32 ? bits : (unsigned)(int)((const short *)e.address)[i];
            square += value * value;
        }
        words[t] = sum;
        parts[t] = square;
    }
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        EACH_THREAD if (t < half) {
            words[t] += words[t + half];
            parts[t] += parts[t + half];
        }
        __syncthreads();
    }
    EACH_THREAD if (t == 0) {
        digests[row] = (int)words[0];
        squares[row] = parts[0];
    }
}

/* Copy the sampled weights into rows of THREADS. */
extern "C" __global__ void keep_rows(const Entry *table, long long entries, char *kept)
{
    const long long row = blockIdx.x;
    const Entry e = *entry_of(table, entries, row);
    EACH_THREAD {
        const long long i = (row - e.row) * THREADS + t, to = row * THREADS + t;
        if (i < e.count && e.kind == FLOAT32)
            ((unsigned *)kept)[to] = ((const unsigned *)e.address)[i * e.step];
        else if (i < e.count)
            ((unsigned short *)kept)[to] = ((const unsigned short *)e.address)[i * e.step];
    }
}

/* Write the norms of the change and of what was kept of each row; an entry without an address is left out. */
extern "C" __global__ void compare_rows(const Entry *table, long long entries, const char *kept, long long kind,
                                        double *out, long long rows)
{
    __shared__ double change[THREADS], weight[THREADS];
    const long long row = blockIdx.x;
    const Entry e = *entry_of(table, entries, row);
    EACH_THREAD {
        const long long i = (row - e.row) * THREADS + t;
        change[t] = weight[t] = 0;
        if (e.address && i < e.count) {
            const double before = __uint_as_float(bits_at(kept, kind, row * THREADS + t));
            const double now = __uint_as_float(bits_at((const char *)e.address, e.kind, i * e.step));
            change[t] = (now - before) * (now - before);
            weight[t] = before * before;
        }
    }
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        EACH_THREAD if (t < half) {
            change[t] += change[t + half];
            weight[t] += weight[t + half];
        }
        __syncthreads();
    }
    EACH_THREAD if (t == 0) {
        out[row] = sqrt(change[0]);
        out[rows + row] = sqrt(weight[0]);
    }
}
