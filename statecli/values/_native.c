/* The sums of `kernels.py` for two blocks of numbers, and the counts and digest of `facts_kernel.py` for one block, each
   in one pass over the bytes.

   numpy needs eleven passes for the former and twenty for the latter. If this file was not compiled, numpy does both.

   Blocks are decoded by rows: to float32 where that holds each value of the type (of integers up to 8 bits the sums of
   a row are exact too), else to float64. Sums of float32 go into float64 after TERMS terms, so that none is further than
   6e-7 (relative, of sums of positive terms) from one made in float64: 8 roundings of 2^-24, and one of each product.
   The sum of before * after, whose terms may cancel, is made in float64 throughout. The lanes are fixed and products
   are not fused with sums, so that any processor, with narrow vectors or wide, finds the same bits. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define TERMS 8
#define ROW (LANES * TERMS)

/* A compiler of Windows makes no vectors wider than the baseline's. */
#ifdef _MSC_VER
#define INLINE static __forceinline
#else
#define INLINE static inline __attribute__((always_inline))
#endif

/* Types up to FLOAT32 are decoded to float32, others to float64; sums of the first three are exact in float32. */
enum {
    BOOL, INT8, UINT8, E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, INT16, UINT16, FLOAT16, BFLOAT16, FLOAT32,
    INT32, UINT32, FLOAT64, INT64, UINT64, COMPLEX64, COMPLEX128, TYPES
};
static const char *const NAMES[] = {
    "bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int16", "uint16",
    "float16", "bfloat16", "float32", "int32", "uint32", "float64", "int64", "uint64", "complex64", "complex128",
};
static const int SIZES[] = {1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8, 8, 16};

/* What has changed: what differs in value, in its bits, or by more than atol + rtol * |before|. */
typedef enum { BY_VALUE, BY_BITS, BY_TOLERANCE } Mode;
typedef struct {
    Mode mode;
    double atol, rtol;
} Change;

typedef struct {
    const char *raw;
    int type;
} Block;

typedef struct {
    double gaps[LANES], squares[LANES], before[LANES], after[LANES], product[LANES], widest[LANES];
    /* The largest gap of float32, as its bits: of what has no sign they are in the order of the numbers. */
    int32_t largest[LANES];
    /* Whether there was a float16 or a float8 that `decode` cannot. */
    int32_t special;
    Py_ssize_t changed, first;
} Sums;

typedef struct {
    Py_ssize_t nan, infinite, minus, zeros, tiny;
    int64_t low, high;
} Counts;

/* The loops, compiled for one instruction set. */
typedef struct {
    const char *name;
    void (*add)(const Block *, const Block *, Change, Py_ssize_t, Sums *);
    void (*add_wide)(const Block *, const Block *, Change, Py_ssize_t, Sums *);
    void (*floats_16)(const char *, Py_ssize_t, int64_t, int64_t, Counts *);
    void (*floats_32)(const char *, Py_ssize_t, int64_t, int64_t, Counts *);
    void (*floats_64)(const char *, Py_ssize_t, int64_t, int64_t, Counts *);
    uint64_t (*digest)(const char *, Py_ssize_t);
} Loops;
/* The loops for this processor. */
static const Loops *loops;

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

/* A row of float8 with `mantissa` bits of mantissa, a bias of `bias`; the codes from `special` on, without their sign,
   are no numbers, or if it is 0 the code of -0. The exponent moves to where float32 has it, then times a power of two:
   that much the biases differ. Subnormals are made of integers, because some processors are slow at multiplying them. */
INLINE int32_t decode_float8(const uint8_t *raw, int mantissa, int bias, int special, float *row) {
    const float unit = value((uint32_t)(127 + 1 - bias - mantissa) << 23), difference = value((uint32_t)(254 - bias) << 23);
    uint8_t found = 0, subnormals = 0;
    for (int n = 0; n < ROW; n++) {
        found |= special ? (raw[n] & 0x7f) >= special : raw[n] == 0x80;
        subnormals |= (uint8_t)((raw[n] & 0x7f) - 1) < (1 << mantissa) - 1;
    }
    if (!subnormals) {
        for (int n = 0; n < ROW; n++) {
            uint32_t extended = (uint32_t)(int32_t)(int8_t)raw[n];
            row[n] = value((extended << (23 - mantissa)) & (0x80000000u | 0x7fu << (23 - mantissa))) * difference;
        }
        return found;
    }
    for (int n = 0; n < ROW; n++) {
        int32_t code = (int8_t)raw[n], size = code & 0x7f;
        int32_t normal = (size << (23 - mantissa)) + ((127 - bias) << 23), subnormal = bits_of((float)size * unit);
        int32_t number = size < 1 << mantissa ? subnormal : normal;
        row[n] = value((uint32_t)number | ((uint32_t)code & 0x80000000u));
    }
    return found;
}

/* A row as float32. A float16's exponent moves to where float32 has it, then times 2^112: that much the biases differ.
   Subnormals come out right; infinities and NaN do not, and are told as special. */
INLINE int32_t decode(const char *raw, int type, float *row) {
    const uint8_t *codes = (const uint8_t *)raw;
    uint16_t halves[ROW];
    if (type == FLOAT32) {
        memcpy(row, raw, 4 * ROW);
        return 0;
    }
    if (type == BOOL) {
        for (int n = 0; n < ROW; n++)
            row[n] = codes[n] != 0;
        return 0;
    }
    if (type == INT8) {
        for (int n = 0; n < ROW; n++)
            row[n] = (int8_t)codes[n];
        return 0;
    }
    if (type == UINT8) {
        for (int n = 0; n < ROW; n++)
            row[n] = codes[n];
        return 0;
    }
    if (type == E4M3FN)
        return decode_float8(codes, 3, 7, 0x7f, row);
    if (type == E5M2)
        return decode_float8(codes, 2, 15, 0x7c, row);
    if (type == E4M3FNUZ)
        return decode_float8(codes, 3, 8, 0, row);
    if (type == E5M2FNUZ)
        return decode_float8(codes, 2, 16, 0, row);
    memcpy(halves, raw, sizeof halves);
    if (type == BFLOAT16) {
        for (int n = 0; n < ROW; n++)
            row[n] = value((uint32_t)halves[n] << 16);
        return 0;
    }
    if (type == INT16) {
        for (int n = 0; n < ROW; n++)
            row[n] = (int16_t)halves[n];
        return 0;
    }
    if (type == UINT16) {
        for (int n = 0; n < ROW; n++)
            row[n] = halves[n];
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

INLINE int differ(float a, float b, Mode mode, Change change) {
    if (mode == BY_TOLERANCE)
        return fabs((double)b - a) > change.atol + change.rtol * fabs(a);
    return mode == BY_BITS ? bits_of(a) != bits_of(b) : a != b;
}

/* More than the relative error of a tolerance in float32, and than the absolute error of one that is not normal. */
#define DOUBT 0x1p-20f
#define LEAST 0x1p-120f
/* A tolerance up to this fits float32, times any value. */
#define MOST 1.0

/* One row of both; `exact`: float32 holds the sum of the products. */
INLINE void add_row(const float *one, const float *two, int exact, Mode mode, Change change, Py_ssize_t at, Sums *sums) {
    float gaps[LANES], squares[LANES], before[LANES], after[LANES], exact_product[LANES];
    double product[LANES];
    int32_t largest[LANES], changed[LANES], doubtful[LANES];
    const float atol = change.atol, rtol = change.rtol;
    for (int lane = 0; lane < LANES; lane++) {
        gaps[lane] = squares[lane] = before[lane] = after[lane] = exact_product[lane] = product[lane] = 0;
        largest[lane] = changed[lane] = doubtful[lane] = 0;
        /* Unrolled, so that the loop over the lanes is the one that is made of vectors. */
        #pragma GCC unroll 8
        for (int n = lane; n < ROW; n += LANES) {
            float a = one[n], b = two[n], gap = b - a;
            int32_t size = bits_of(gap) & 0x7fffffff;
            gaps[lane] += value(size);
            squares[lane] += gap * gap;
            before[lane] += a * a;
            after[lane] += b * b;
            if (exact)
                exact_product[lane] += a * b;
            else
                product[lane] += (double)a * b;
            largest[lane] = size > largest[lane] ? size : largest[lane];
            if (mode == BY_TOLERANCE) {  /* in float32; only a row with doubtful elements is compared in float64 */
                float limit = atol + rtol * fabsf(a);
                changed[lane] += value(size) > limit * (1 + DOUBT) + LEAST;
                doubtful[lane] += value(size) > limit * (1 - DOUBT) - LEAST;
            } else
                changed[lane] += differ(a, b, mode, change);
        }
    }
    int32_t count = 0, doubt = 0;
    for (int lane = 0; lane < LANES; lane++) {
        sums->gaps[lane] += gaps[lane];
        sums->squares[lane] += squares[lane];
        sums->before[lane] += before[lane];
        sums->after[lane] += after[lane];
        sums->product[lane] += exact ? exact_product[lane] : product[lane];
        sums->largest[lane] = largest[lane] > sums->largest[lane] ? largest[lane] : sums->largest[lane];
        count += changed[lane];
        doubt += doubtful[lane];
    }
    if (mode == BY_TOLERANCE && (doubt != count || change.atol > MOST || change.rtol > MOST)) {
        count = 0;
        for (int n = 0; n < ROW; n++)
            count += differ(one[n], two[n], mode, change);
    }
    if (count && sums->first < 0) {
        int n = 0;
        while (!differ(one[n], two[n], mode, change))
            n++;
        sums->first = at + n;
    }
    sums->changed += count;
}

/* The bytes of a row; past the end of the block zeros, which add nothing. */
INLINE const char *take_row(const Block *block, Py_ssize_t at, Py_ssize_t count, char *last) {
    const char *raw = block->raw + at * SIZES[block->type];
    return count - at >= ROW ? raw : memcpy(last, raw, (count - at) * SIZES[block->type]);
}

INLINE void add(const Block *one, const Block *two, Change change, Py_ssize_t count, Sums *sums) {
    float a[ROW], b[ROW];
    char last[2][4 * ROW] = {{0}};
    int type = one->type, other = two->type, exact = type <= UINT8 && other <= UINT8;
    for (Py_ssize_t at = 0; at < count; at += ROW) {
        const char *x = take_row(one, at, count, last[0]), *y = take_row(two, at, count, last[1]);
        sums->special |= decode(x, type, a) | decode(y, other, b);
        if (change.mode == BY_BITS)
            add_row(a, b, 0, BY_BITS, change, at, sums);
        else if (change.mode == BY_TOLERANCE && exact)
            add_row(a, b, 1, BY_TOLERANCE, change, at, sums);
        else if (change.mode == BY_TOLERANCE)
            add_row(a, b, 0, BY_TOLERANCE, change, at, sums);
        else if (exact)
            add_row(a, b, 1, BY_VALUE, change, at, sums);
        else
            add_row(a, b, 0, BY_VALUE, change, at, sums);
    }
}

/* --- in float64 --- */

INLINE double double_of(uint64_t bits) {
    double found;
    memcpy(&found, &bits, 8);
    return found;
}

/* An integer of 64 bits, rounded once, in steps of which compilers make vectors: 2^84 and 2^52 hold its halves. */
INLINE double rounded(uint64_t number) {
    return (double_of(number >> 32 | 0x4530000000000000u) - 0x1.00000001p84) +
           double_of((number & 0xffffffffu) | 0x4330000000000000u);
}

INLINE double rounded_signed(uint64_t number) {
    return (double_of((number >> 32 ^ 0x80000000u) | 0x4530000000000000u) - 0x1.00000801p84) +
           double_of((number & 0xffffffffu) | 0x4330000000000000u);
}

/* A row as float64; of complex numbers one part of each. */
#define WIDEN(TYPE, STEP, EXPRESSION)                                                                                  \
    {                                                                                                                  \
        for (int n = 0; n < ROW; n++) {                                                                                \
            TYPE number;                                                                                               \
            memcpy(&number, raw + STEP * n, sizeof number);                                                            \
            row[n] = EXPRESSION;                                                                                       \
        }                                                                                                              \
        return 0;                                                                                                      \
    }
INLINE int32_t widen(const char *raw, int type, double *row) {
    float narrow[ROW];
    if (type == INT32)
        WIDEN(int32_t, 4, number)
    if (type == UINT32)
        WIDEN(uint32_t, 4, number)
    if (type == INT64)
        WIDEN(uint64_t, 8, rounded_signed(number))
    if (type == UINT64)
        WIDEN(uint64_t, 8, rounded(number))
    if (type == FLOAT64)
        WIDEN(double, 8, number)
    if (type == COMPLEX64)
        WIDEN(float, 8, number)
    if (type == COMPLEX128)
        WIDEN(double, 16, number)
    int32_t special = decode(raw, type, narrow);
    for (int n = 0; n < ROW; n++)
        row[n] = narrow[n];
    return special;
}

/* The squares may vanish, but no result is less than a leg. */
INLINE double hypotenuse(double one, double two) {
    double root = sqrt(one * one + two * two), leg = one > two ? one : two;
    return root > leg ? root : leg;
}

/* |after - before| of 64-bit integers, rounded once. */
INLINE void integer_gaps(const char *one, const char *two, uint64_t sign, double *gaps) {
    for (int n = 0; n < ROW; n++) {
        uint64_t a, b;
        memcpy(&a, one + 8 * n, 8), memcpy(&b, two + 8 * n, 8);
        a ^= sign, b ^= sign;
        gaps[n] = rounded(a > b ? a - b : b - a);
    }
}

/* The sums of a row of numbers, besides those of the gaps. */
INLINE void add_products(const double *one, const double *two, Sums *sums) {
    for (int lane = 0; lane < LANES; lane++) {
        double before = 0, after = 0, product = 0;
        #pragma GCC unroll 8
        for (int n = lane; n < ROW; n += LANES) {
            before += one[n] * one[n];
            after += two[n] * two[n];
            product += one[n] * two[n];
        }
        sums->before[lane] += before;
        sums->after[lane] += after;
        sums->product[lane] += product;
    }
}

/* The gaps of a row of elements, whose absolute values before are `sizes`. */
INLINE void add_gaps(const double *gaps, const double *sizes, Change change, Py_ssize_t at, Sums *sums) {
    int64_t changed[ROW], count = 0;
    for (int n = 0; n < ROW; n++)
        changed[n] = gaps[n] > (change.mode == BY_TOLERANCE ? change.atol + change.rtol * sizes[n] : 0);
    for (int n = 0; n < ROW; n++)
        count += changed[n];
    for (int lane = 0; lane < LANES; lane++) {
        double sum = 0, squares = 0, widest = sums->widest[lane];
        #pragma GCC unroll 8
        for (int n = lane; n < ROW; n += LANES) {
            sum += gaps[n];
            squares += gaps[n] * gaps[n];
            widest = gaps[n] > widest ? gaps[n] : widest;
        }
        sums->gaps[lane] += sum;
        sums->squares[lane] += squares;
        sums->widest[lane] = widest;
    }
    for (int n = 0; count && sums->first < 0; n++)
        if (changed[n])
            sums->first = at + n;
    sums->changed += count;
}

INLINE void add_wide(const Block *one, const Block *two, Change change, Py_ssize_t count, Sums *sums) {
    double a[ROW], b[ROW], gaps[ROW], sizes[ROW], imaginary[ROW], other_imaginary[ROW];
    char last[2][16 * ROW] = {{0}};
    int type = one->type, other = two->type;
    for (Py_ssize_t at = 0; at < count; at += ROW) {
        const char *x = take_row(one, at, count, last[0]), *y = take_row(two, at, count, last[1]);
        sums->special |= widen(x, type, a) | widen(y, other, b);
        add_products(a, b, sums);
        for (int n = 0; n < ROW; n++)
            gaps[n] = fabs(b[n] - a[n]), sizes[n] = fabs(a[n]);
        if (type == INT64 || type == UINT64)
            integer_gaps(x, y, type == INT64 ? (uint64_t)1 << 63 : 0, gaps);
        if (type >= COMPLEX64) {
            widen(x + SIZES[type] / 2, type, imaginary), widen(y + SIZES[other] / 2, other, other_imaginary);
            add_products(imaginary, other_imaginary, sums);
            for (int n = 0; n < ROW; n++)
                gaps[n] = hypotenuse(gaps[n], fabs(other_imaginary[n] - imaginary[n]));
            for (int n = 0; n < ROW && change.mode == BY_TOLERANCE; n++)
                sizes[n] = hypotenuse(sizes[n], fabs(imaginary[n]));
        }
        add_gaps(gaps, sizes, change, at, sums);
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

/* Whether the two types are compared here: what has no float64 for each value only with the same type. */
static int are_comparable(int type, int other) {
    int exact = type != INT64 && type != UINT64 && other != INT64 && other != UINT64;
    return (exact || type == other) && (type >= COMPLEX64) == (other >= COMPLEX64);
}

/* Sums of squares below these may lack terms that vanished, in float32 and in float64. */
#define LEAST_NARROW 0x1p-80
#define LEAST_WIDE 0x1p-900

/* The bits of eight bytes of elements that are not the sign of a zero. */
static uint64_t magnitude(int type) {
    if (type >= E4M3FN && type <= E5M2FNUZ)
        return 0x7f7f7f7f7f7f7f7fu;
    if (type == FLOAT16 || type == BFLOAT16)
        return 0x7fff7fff7fff7fffu;
    if (type == FLOAT32 || type == COMPLEX64)
        return 0x7fffffff7fffffffu;
    return type == FLOAT64 || type == COMPLEX128 ? 0x7fffffffffffffffu : UINT64_MAX;
}

static int is_zero(const Block *block, Py_ssize_t count) {
    Py_ssize_t length = count * SIZES[block->type];
    for (Py_ssize_t at = 0; at < length; at += ROW) {
        uint64_t words[ROW / 8] = {0}, found = 0;
        memcpy(words, block->raw + at, length - at < ROW ? length - at : ROW);
        for (int n = 0; n < ROW / 8; n++)
            found |= words[n];
        if (found & magnitude(block->type))
            return 0;
    }
    return 1;
}

static double largest_gap(const Sums *sums) {
    double largest = 0;
    for (int lane = 0; lane < LANES; lane++) {
        double widest = sums->widest[lane], narrow = value(sums->largest[lane]);
        widest = narrow > widest ? narrow : widest;
        largest = widest > largest ? widest : largest;
    }
    return largest;
}

/* Whether each term is finite and each square of a number is in its sum: `least` is that of the sums' type. */
static int are_complete(const Sums *sums, double least, const Block *one, const Block *two, Py_ssize_t count) {
    double squares = total(sums->squares), before = total(sums->before), after = total(sums->after);
    return isfinite(total(sums->gaps) + squares + before + after) && (squares >= least || !largest_gap(sums)) &&
           (before >= least || is_zero(one, count)) && (after >= least || is_zero(two, count));
}

/* False where a number is not finite, or sums would not be complete in float64. */
static int add_all(const Block *one, const Block *two, Change change, Py_ssize_t count, Sums *sums) {
    if (one->type <= FLOAT32 && two->type <= FLOAT32) {
        loops->add(one, two, change, count, sums);
        if (sums->special || are_complete(sums, LEAST_NARROW, one, two, count))
            return !sums->special;
        Py_ssize_t changed = sums->changed, first = sums->first;
        memset(sums, 0, sizeof *sums);
        loops->add_wide(one, two, change, count, sums);
        sums->changed = changed, sums->first = first;  /* `add_wide` compares no bits */
    } else
        loops->add_wide(one, two, change, count, sums);
    return !sums->special && are_complete(sums, LEAST_WIDE, one, two, count);
}

static PyObject *tally(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer one, two;
    const char *name, *other_name;
    int bits;
    Change change = {BY_VALUE, 0, 0};
    if (!PyArg_ParseTuple(args, "y*y*sspdd", &one, &two, &name, &other_name, &bits, &change.atol, &change.rtol))
        return NULL;
    PyObject *found = NULL;
    Block before = {one.buf, type_named(name)}, after = {two.buf, before.type < 0 ? -1 : type_named(other_name)};
    if (before.type < 0 || after.type < 0)
        goto end;
    int size = SIZES[before.type], other_size = SIZES[after.type];
    Py_ssize_t count = one.len / size;
    if (one.len % size || two.len % other_size || two.len / other_size != count) {
        PyErr_SetString(PyExc_ValueError, "the blocks are not of equally many elements");
        goto end;
    }
    if (!are_comparable(before.type, after.type)) {
        PyErr_Format(PyExc_ValueError, "%s and %s are not compared here", name, other_name);
        goto end;
    }
    change.mode = bits ? BY_BITS : change.atol || change.rtol ? BY_TOLERANCE : BY_VALUE;
    Sums sums = {.first = -1};
    int complete;
    Py_BEGIN_ALLOW_THREADS;
    complete = add_all(&before, &after, change, count, &sums);
    Py_END_ALLOW_THREADS;
    found = !complete ? Py_BuildValue("")
                      : Py_BuildValue("nnndddddd", count, sums.changed, sums.first, largest_gap(&sums),
                                      total(sums.gaps), total(sums.squares), total(sums.before), total(sums.after),
                                      total(sums.product));
end:
    PyBuffer_Release(&one);
    PyBuffer_Release(&two);
    return found;
}

/* --- one block: what of it is no number, its range --- */

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
    INLINE void floats_##BITS(const char *raw, Py_ssize_t count, int64_t infinity, int64_t normal, Counts *all)        \
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
    (size == 2 ? loops->floats_16 : size == 4 ? loops->floats_32 : loops->floats_64)
        (block.buf, block.len / size, infinity, normal, &counts);
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

INLINE uint64_t digest_of(const char *raw, Py_ssize_t length) {
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
    total = loops->digest(block.buf, block.len);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&block);
    return PyLong_FromUnsignedLongLong(total);
}

/* --- the loops for each instruction set --- */

#define LOOPS(SET, TARGET)                                                                                             \
    TARGET static void add_##SET(const Block *one, const Block *two, Change change, Py_ssize_t count, Sums *sums)      \
    {                                                                                                                  \
        add(one, two, change, count, sums);                                                                            \
    }                                                                                                                  \
    TARGET static void add_wide_##SET(const Block *one, const Block *two, Change change, Py_ssize_t count, Sums *sums) \
    {                                                                                                                  \
        add_wide(one, two, change, count, sums);                                                                       \
    }                                                                                                                  \
    FLOATS_LOOP(16, SET, TARGET)                                                                                       \
    FLOATS_LOOP(32, SET, TARGET)                                                                                       \
    FLOATS_LOOP(64, SET, TARGET)                                                                                       \
    TARGET static uint64_t digest_##SET(const char *raw, Py_ssize_t length)                                            \
    {                                                                                                                  \
        return digest_of(raw, length);                                                                                 \
    }                                                                                                                  \
    static const Loops SET = {#SET, add_##SET, add_wide_##SET, floats_16_##SET, floats_32_##SET, floats_64_##SET,      \
                              digest_##SET};
#define FLOATS_LOOP(BITS, SET, TARGET)                                                                                 \
    TARGET static void floats_##BITS##_##SET(const char *raw, Py_ssize_t count, int64_t infinity, int64_t normal,      \
                                             Counts *all)                                                              \
    {                                                                                                                  \
        floats_##BITS(raw, count, infinity, normal, all);                                                              \
    }

LOOPS(baseline, )
/* Without ifunc, which neither musl nor macOS has. On ARM the baseline has NEON. */
#if defined(__x86_64__) && defined(__GNUC__)
LOOPS(avx2, __attribute__((target("avx2"))))
LOOPS(avx512f, __attribute__((target("avx512f"))))
#define IS_SUPPORTED(SET) __builtin_cpu_supports(#SET)
static const Loops *const SETS[] = {&avx512f, &avx2, &baseline};
static int has_set(const Loops *set) {
    return set == &avx512f ? IS_SUPPORTED(avx512f) : set == &avx2 ? IS_SUPPORTED(avx2) : 1;
}
#else
static const Loops *const SETS[] = {&baseline};
static int has_set(const Loops *set) {
    return set == &baseline;
}
#endif

/* Use the loops for the set of that name, or without a name those for the widest set of this processor. */
static int choose(const char *name) {
    for (size_t n = 0; n < sizeof SETS / sizeof *SETS; n++)
        if (name ? !strcmp(name, SETS[n]->name) && has_set(SETS[n]) : has_set(SETS[n])) {
            loops = SETS[n];
            return 1;
        }
    return 0;
}

static PyObject *instruction_set(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "|s", &name))
        return NULL;
    if (name && !choose(name))
        return PyErr_Format(PyExc_ValueError, "not an instruction set of this processor: %s", name);
    return PyUnicode_FromString(loops->name);
}

static PyMethodDef METHODS[] = {
    {"tally", tally, METH_VARARGS, "See _native.pyi."},
    {"floats", floats, METH_VARARGS, "See _native.pyi."},
    {"codes", codes, METH_VARARGS, "See _native.pyi."},
    {"digest", digest, METH_VARARGS, "See _native.pyi."},
    {"instruction_set", instruction_set, METH_VARARGS, "See _native.pyi."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    for (uint64_t n = 0; n < WORDS; n++)
        keys[n] = mixed((n + 1) * GOLDEN);
    for (uint64_t n = 0; n < WIDTH; n++)
        lanes[n] = mixed((n + WORDS + 1) * GOLDEN) | 1;
    choose(NULL);
    PyObject *module = PyModule_Create(&MODULE);
    if (module && PyModule_AddIntConstant(module, "VERSION", 4)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
