/* The sums of `kernels.py` for two blocks of floats, and the counts and digest of `facts_kernel.py` for one block, each
   in one pass over the bytes.

   numpy needs eleven passes for the former and twenty for the latter. If this file was not compiled, numpy does both.

   Sums of float32 go into float64 after TERMS terms, so that none is further than 6e-7 (relative, of sums of positive
   terms) from one made in float64: 8 roundings of 2^-24, and one of each product. The sum of before * after, whose
   terms may cancel, is made in float64 throughout. The lanes are fixed and products are not fused with sums, so that
   any processor, with narrow vectors or wide, finds the same bits. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define TERMS 8
#define ROW (LANES * TERMS)

/* Vectors as wide as those of the processor that runs it. */
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif
#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32, BFLOAT16, FLOAT16, TYPES };
static const char *const NAMES[] = {"float32", "bfloat16", "float16"};
static const int SIZES[] = {4, 2, 2};

typedef struct {
    double gaps[LANES], squares[LANES], before[LANES], after[LANES], product[LANES];
    /* The largest gap, as its bits: of what has no sign they are in the order of the numbers. */
    int32_t largest[LANES];
    /* Whether there was a float16 that `decode` cannot. */
    int32_t special;
    Py_ssize_t changed, first;
} Sums;

INLINE float value(uint32_t bits) {
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

INLINE int32_t bits_of(float number) {
    int32_t found;
    memcpy(&found, &number, 4);
    return found;
}

/* A row as float32. A float16's exponent moves to where float32 has it, then times 2^112: that much the biases differ.
   Subnormals come out right; infinities and NaN do not, and are told as special. */
INLINE int32_t decode(const char *raw, int type, float *row) {
    uint16_t halves[ROW];
    if (type == FLOAT32) {
        memcpy(row, raw, 4 * ROW);
        return 0;
    }
    memcpy(halves, raw, sizeof halves);
    if (type == BFLOAT16) {
        for (int n = 0; n < ROW; n++)
            row[n] = value((uint32_t)halves[n] << 16);
        return 0;
    }
    uint16_t special = 0;
    for (int n = 0; n < ROW; n++)
        special |= (halves[n] & 0x7c00) == 0x7c00;
    for (int n = 0; n < ROW; n++) {
        uint32_t extended = (uint32_t)(int32_t)(int16_t)halves[n];
        row[n] = value(extended << 13 & 0x8fffe000) * 0x1p112f;
    }
    return special;
}

INLINE int differ(float a, float b, int bits) {
    return bits ? bits_of(a) != bits_of(b) : a != b;
}

/* One row of both; `bits`: what differs in its bits has changed. */
INLINE void add_row(const float *one, const float *two, int bits, Py_ssize_t at, Sums *sums) {
    float gaps[LANES], squares[LANES], before[LANES], after[LANES];
    double product[LANES];
    int32_t largest[LANES], changed[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        gaps[lane] = squares[lane] = before[lane] = after[lane] = product[lane] = 0;
        largest[lane] = changed[lane] = 0;
        /* Unrolled, so that the loop over the lanes is the one that is made of vectors. */
        #pragma GCC unroll 8
        for (int n = lane; n < ROW; n += LANES) {
            float a = one[n], b = two[n], gap = b - a;
            int32_t size = bits_of(gap) & 0x7fffffff;
            gaps[lane] += value(size);
            squares[lane] += gap * gap;
            before[lane] += a * a;
            after[lane] += b * b;
            product[lane] += (double)a * b;
            largest[lane] = size > largest[lane] ? size : largest[lane];
            changed[lane] += differ(a, b, bits);
        }
    }
    int32_t count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        sums->gaps[lane] += gaps[lane];
        sums->squares[lane] += squares[lane];
        sums->before[lane] += before[lane];
        sums->after[lane] += after[lane];
        sums->product[lane] += product[lane];
        sums->largest[lane] = largest[lane] > sums->largest[lane] ? largest[lane] : sums->largest[lane];
        count += changed[lane];
    }
    if (count && sums->first < 0) {
        int n = 0;
        while (!differ(one[n], two[n], bits))
            n++;
        sums->first = at + n;
    }
    sums->changed += count;
}

WIDEST static void add(const char *one, const char *two, int type, int other, int bits, Py_ssize_t count, Sums *sums) {
    float a[ROW], b[ROW];
    char last[2][4 * ROW] = {{0}};
    for (Py_ssize_t at = 0; at < count; at += ROW) {
        const char *x = one + at * SIZES[type], *y = two + at * SIZES[other];
        if (count - at < ROW) {
            x = memcpy(last[0], x, (count - at) * SIZES[type]);
            y = memcpy(last[1], y, (count - at) * SIZES[other]);
        }
        sums->special |= decode(x, type, a) | decode(y, other, b);
        if (bits)
            add_row(a, b, 1, at, sums);
        else
            add_row(a, b, 0, at, sums);
    }
}

static double total(const double *lanes) {
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    return sum;
}

static int type_named(const char *name) {
    for (int type = 0; type < TYPES; type++)
        if (!strcmp(name, NAMES[type]))
            return type;
    PyErr_Format(PyExc_ValueError, "not a type that is summed here: %s", name);
    return -1;
}

static PyObject *tally(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer one, two;
    const char *name, *other_name;
    int bits;
    if (!PyArg_ParseTuple(args, "y*y*ssp", &one, &two, &name, &other_name, &bits))
        return NULL;
    PyObject *found = NULL;
    int type = type_named(name), other = type < 0 ? -1 : type_named(other_name);
    if (type < 0 || other < 0)
        goto end;
    Py_ssize_t count = one.len / SIZES[type];
    if (one.len % SIZES[type] || two.len % SIZES[other] || two.len / SIZES[other] != count) {
        PyErr_SetString(PyExc_ValueError, "the blocks are not of equally many elements");
        goto end;
    }
    Sums sums = {.first = -1};
    Py_BEGIN_ALLOW_THREADS;
    add(one.buf, two.buf, type, other, bits, count, &sums);
    Py_END_ALLOW_THREADS;
    int32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        largest = sums.largest[lane] > largest ? sums.largest[lane] : largest;
    if (sums.special)
        found = Py_BuildValue("");
    else
        found = Py_BuildValue("nndddddd", sums.changed, sums.first, (double)value(largest), total(sums.gaps),
                              total(sums.squares), total(sums.before), total(sums.after), total(sums.product));
end:
    PyBuffer_Release(&one);
    PyBuffer_Release(&two);
    return found;
}

/* --- one block: what of it is no number, its range --- */

typedef struct {
    Py_ssize_t nan, infinite, minus, zeros, tiny;
    int64_t low, high;
} Counts;

/* Counts of a stretch fit an integer as wide as the elements, so that vectors need not be widened. */
#define STRETCH 2048
#define SIGNED(BITS) int##BITS##_t

/* `low` and `high` are of finite numbers, as integers in the order of the numbers: negative ones with their magnitude
   inverted. Where none is finite `low` stays above `high`. Masks instead of conditions: the compiler makes vectors of
   them, and of the other only where the bounds are known to it (twenty times slower). */
#define FLOATS(BITS)                                                                                                   \
    INLINE void stretch_##BITS(const SIGNED(BITS) *some, int length, SIGNED(BITS) infinity, SIGNED(BITS) normal,       \
                               SIGNED(BITS) *lowest, SIGNED(BITS) *highest, Counts *found)                             \
    {                                                                                                                  \
        const SIGNED(BITS) top = INT##BITS##_MAX, bottom = INT##BITS##_MIN, negative = infinity | bottom;              \
        SIGNED(BITS) low = *lowest, high = *highest, nan = 0, infinite = 0, minus = 0, zeros = 0, tiny = 0;            \
        for (int n = 0; n < length; n++) {                                                                             \
            SIGNED(BITS) bits = some[n], size = bits & top, order = bits ^ ((bits >> (BITS - 1)) & top);               \
            SIGNED(BITS) finite = -(size < infinity);                                                                  \
            SIGNED(BITS) from_below = (order & finite) | (top & ~finite);                                              \
            SIGNED(BITS) from_above = (order & finite) | (bottom & ~finite);                                           \
            nan += size > infinity;                                                                                    \
            infinite += size == infinity;                                                                              \
            minus += bits == negative;                                                                                 \
            zeros += size == 0;                                                                                        \
            tiny += size < normal;                                                                                     \
            low = from_below < low ? from_below : low;                                                                 \
            high = from_above > high ? from_above : high;                                                              \
        }                                                                                                              \
        found->nan += nan, found->infinite += infinite, found->minus += minus;                                         \
        found->zeros += zeros, found->tiny += tiny, *lowest = low, *highest = high;                                    \
    }                                                                                                                  \
    WIDEST static void floats_##BITS(const char *raw, Py_ssize_t count, int64_t infinity, int64_t normal, Counts *all) \
    {                                                                                                                  \
        const SIGNED(BITS) *items = (const SIGNED(BITS) *)raw;                                                         \
        SIGNED(BITS) low = INT##BITS##_MAX, high = INT##BITS##_MIN;                                                    \
        Py_ssize_t at = 0;                                                                                             \
        for (; at + STRETCH <= count; at += STRETCH)                                                                   \
            stretch_##BITS(items + at, STRETCH, infinity, normal, &low, &high, all);                                   \
        stretch_##BITS(items + at, count - at, infinity, normal, &low, &high, all);                                    \
        all->low = low < 0 ? low ^ INT##BITS##_MAX : low;                                                              \
        all->high = high < 0 ? high ^ INT##BITS##_MAX : high;                                                          \
    }
FLOATS(16)
FLOATS(32)
FLOATS(64)

static PyObject *floats(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer block;
    int size;
    long long infinity, normal;
    if (!PyArg_ParseTuple(args, "y*iLL", &block, &size, &infinity, &normal))
        return NULL;
    PyObject *found = NULL;
    if ((size != 2 && size != 4 && size != 8) || block.len % size || (uintptr_t)block.buf % size) {
        PyErr_SetString(PyExc_ValueError, "not a block of floats of 2, 4 or 8 bytes");
        goto end;
    }
    Counts counts = {0};
    Py_BEGIN_ALLOW_THREADS;
    (size == 2 ? floats_16 : size == 4 ? floats_32 : floats_64)(block.buf, block.len / size, infinity, normal, &counts);
    Py_END_ALLOW_THREADS;
    found = Py_BuildValue("nnnnnLL", counts.nan, counts.infinite, counts.minus, counts.zeros, counts.tiny,
                          (long long)counts.low, (long long)counts.high);
end:
    PyBuffer_Release(&block);
    return found;
}

/* --- how often each code of one byte occurs --- */

/* Equal codes in a row would wait for each other's counter. */
#define COUNTERS 8

static PyObject *codes(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer block;
    if (!PyArg_ParseTuple(args, "y*", &block))
        return NULL;
    int64_t counts[COUNTERS][256] = {{0}};
    const uint8_t *raw = block.buf;
    Py_BEGIN_ALLOW_THREADS;
    Py_ssize_t at = 0;
    for (; at + COUNTERS <= block.len; at += COUNTERS)
        for (int n = 0; n < COUNTERS; n++)
            counts[n][raw[at + n]]++;
    for (; at < block.len; at++)
        counts[0][raw[at]]++;
    for (int code = 0; code < 256; code++)
        for (int n = 1; n < COUNTERS; n++)
            counts[0][code] += counts[n][code];
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&block);
    return PyBytes_FromStringAndSize((const char *)counts[0], sizeof counts[0]);
}

/* --- digests --- */

#define GOLDEN 0x9e3779b97f4a7c15u
#define WORDS 128
#define WIDTH 8
static uint64_t keys[WORDS], lanes[WIDTH];

static uint64_t mixed(uint64_t number) {
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9u;
    number = (number ^ number >> 27) * 0x94d049bb133111ebu;
    return number ^ number >> 31;
}

INLINE void add_words(const char *raw, uint64_t *sums) {
    uint64_t words[WORDS], row[WIDTH] = {0};
    memcpy(words, raw, sizeof words);
    for (int at = 0; at < WORDS; at += WIDTH)
        for (int n = 0; n < WIDTH; n++) {
            uint64_t word = words[at + n], key = keys[at + n];
            uint64_t lower = (word + key) & 0xffffffffu, upper = ((word >> 32) + (key >> 32)) & 0xffffffffu;
            row[n] += lower * upper;
        }
    for (int n = 0; n < WIDTH; n++)
        sums[n] = sums[n] * GOLDEN + row[n];
}

WIDEST static uint64_t digest_of(const char *raw, Py_ssize_t length) {
    uint64_t sums[WIDTH] = {0}, total = 0;
    char last[8 * WORDS] = {0};
    Py_ssize_t at = 0;
    for (; at + (Py_ssize_t)sizeof last <= length; at += sizeof last)
        add_words(raw + at, sums);
    if (at < length) {
        memcpy(last, raw + at, length - at);
        add_words(last, sums);
    }
    for (int n = 0; n < WIDTH; n++)
        total += sums[n] * lanes[n];
    return total;
}

static PyObject *digest(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer block;
    if (!PyArg_ParseTuple(args, "y*", &block))
        return NULL;
    uint64_t total;
    Py_BEGIN_ALLOW_THREADS;
    total = digest_of(block.buf, block.len);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&block);
    return PyLong_FromUnsignedLongLong(total);
}

static PyMethodDef METHODS[] = {
    {"tally", tally, METH_VARARGS, "See _native.pyi."},
    {"floats", floats, METH_VARARGS, "See _native.pyi."},
    {"codes", codes, METH_VARARGS, "See _native.pyi."},
    {"digest", digest, METH_VARARGS, "See _native.pyi."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    for (uint64_t n = 0; n < WORDS; n++)
        keys[n] = mixed((n + 1) * GOLDEN);
    for (uint64_t n = 0; n < WIDTH; n++)
        lanes[n] = mixed((n + WORDS + 1) * GOLDEN) | 1;
    return PyModule_Create(&MODULE);
}
