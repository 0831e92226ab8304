/* Resizes rows of pixels as torch does (bilinear, antialias), to the bit.

torch's kernel for bytes has weights of 16 bits, resizes rows first and rounds after each direction; what we leave out
is to have the whole of the image in memory in between, and what is beside the window that is asked for. On every
processor the sums are those of whole numbers, so the result is the same. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum {
    WIDE = 16,
    MOST_PRECISION = 22
}; /* bytes that are added up at once; bits behind the point of a weight, at most */

typedef struct {
    int size, num_weights; /* pixels of the result; weights of each, an even number */
    int precision;         /* bits of the weights behind the point */
    int *first;            /* the pixel that the first weight of each belongs to */
    short *weights;
} axis;

/* Writes the weights of a pixel of the result, with the number of the first one's pixel, and returns how many they are.
 */
static int weigh(double *weights, int *first, int pixel, int input, double scale) {
    double support = scale > 1 ? scale : 1, sharpness = scale > 1 ? 1 / scale : 1, total = 0;
    double centre = scale * (pixel + 0.5);
    int start = (int)(centre - support + 0.5), stop = (int)(centre + support + 0.5);
    if (start < 0) start = 0;
    if (stop > input) stop = input;
    for (int n = 0; n < stop - start; n++) {
        double distance = fabs((n + start - centre + 0.5) * sharpness);
        total += weights[n] = distance < 1 ? 1 - distance : 0;
    }
    for (int n = 0; n < stop - start; n++)
        weights[n] /= total;
    *first = start;
    return stop - start;
}

/* Makes the axis of `size` pixels, from `start` on, of `input` pixels that are resized to `output`. Returns 1, or 0
   where there is no memory. */
static int make_axis(axis *a, int input, int output, int start, int size, int is_mirrored) {
    double scale = (double)input / output, greatest = 0;
    size_t most = ((size_t)scale + 1) * 2 + 1; /* weights of a pixel, one more or less */
    double *all = calloc((size_t)size + 1, most * sizeof *all), *others = all + (size_t)size * most;
    *a = (axis){.size = size, .first = malloc((size_t)size * sizeof(int))};
    if (!all || !a->first) return free(all), 0;
    for (int pixel = 0; pixel < output; pixel++) { /* one that is not asked for may have the greatest weight, too */
        int place = is_mirrored ? start + size - 1 - pixel : pixel - start, is_own = place >= 0 && place < size, first;
        double *weights = is_own ? all + (size_t)place * most : others;
        int num = weigh(weights, &first, pixel, input, scale);
        if (is_own) a->first[place] = first;
        if (num > a->num_weights) a->num_weights = num;
        for (int n = 0; n < num; n++)
            greatest = weights[n] > greatest ? weights[n] : greatest;
    }
    a->num_weights += a->num_weights & 1;
    while (a->precision < MOST_PRECISION && (int)(0.5 + greatest * (2 << a->precision)) < 1 << 15)
        a->precision++;
    a->weights = calloc((size_t)size * (size_t)a->num_weights, sizeof *a->weights);
    for (int place = 0; a->weights && place < size; place++) {
        for (int n = 0; n < a->num_weights && n < (int)most; n++)
            a->weights[place * a->num_weights + n] =
                (short)(0.5 + all[(size_t)place * most + (size_t)n] * (1 << a->precision));
    }
    free(all);
    return a->weights != 0;
}

static void free_axis(axis *a) {
    free(a->first);
    free(a->weights);
}

static int last_of(const axis *a) { /* the pixel behind the last one that is looked at */
    int last = a->first[0] > a->first[a->size - 1] ? a->first[0] : a->first[a->size - 1];
    return last + a->num_weights;
}

static int first_of(const axis *a) { return a->first[0] < a->first[a->size - 1] ? a->first[0] : a->first[a->size - 1]; }

#ifdef __SSE2__

/* Puts the bytes of each pixel of 4 bytes beside those of the next: 8 bytes for each, up to 3 pixels more than `num`.
 */
static void pair_pixels(const unsigned char *row, size_t num, unsigned char *pairs) {
    for (size_t at = 0; at < num; at += 4) {
        __m128i these = _mm_loadu_si128((const __m128i *)(row + 4 * at));
        __m128i next = _mm_loadu_si128((const __m128i *)(row + 4 * at + 4));
        _mm_storeu_si128((__m128i *)(pairs + 8 * at), _mm_unpacklo_epi8(these, next));
        _mm_storeu_si128((__m128i *)(pairs + 8 * at + 16), _mm_unpackhi_epi8(these, next));
    }
}

static inline void resize_pairs(const axis *a, const unsigned char *pairs, unsigned char *out, int num_weights) {
    __m128i zero = _mm_setzero_si128(), half = _mm_set1_epi32(1 << a->precision >> 1);
    __m128i shift = _mm_cvtsi32_si128(a->precision);
    const short *weights = a->weights;
    for (int place = 0; place < a->size; place++, out += 3, weights += num_weights) {
        const unsigned char *pair = pairs + 8 * (size_t)a->first[place];
        __m128i sum = half;
        for (int n = 0; n < num_weights; n += 2) {
            int both;
            memcpy(&both, weights + n, sizeof both);
            __m128i two = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)(pair + 8 * n)), zero);
            sum = _mm_add_epi32(sum, _mm_madd_epi16(two, _mm_set1_epi32(both)));
        }
        sum = _mm_sra_epi32(sum, shift);
        sum = _mm_packs_epi32(sum, sum);
        int bytes = _mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
        memcpy(out, &bytes, sizeof bytes);
    }
}

/* Resizes a row of `num` pixels of 4 bytes, and one that does not count, to pixels of 3 bytes and a byte behind these.
   `pairs` has room for 8 bytes for each of them and 3 more; the usual numbers of weights have code of their own. */
static void resize_row(const axis *a, const unsigned char *row, size_t num, unsigned char *pairs, unsigned char *out) {
    pair_pixels(row, num, pairs);
    if (a->num_weights == 2) return resize_pairs(a, pairs, out, 2);
    if (a->num_weights == 4) return resize_pairs(a, pairs, out, 4);
    resize_pairs(a, pairs, out, a->num_weights);
}

static inline void add_up(const axis *a, int place, unsigned char *const *rows, size_t length, unsigned char *out,
                          int num_weights) {
    const short *weights = a->weights + (size_t)place * (size_t)num_weights;
    __m128i zero = _mm_setzero_si128(), half = _mm_set1_epi32(1 << a->precision >> 1);
    __m128i shift = _mm_cvtsi32_si128(a->precision);
    for (size_t at = 0; at < length; at += WIDE) {
        __m128i sums[4] = {half, half, half, half};
        for (int n = 0; n < num_weights; n += 2) {
            int pair;
            memcpy(&pair, weights + n, sizeof pair);
            __m128i one = _mm_loadu_si128((const __m128i *)(rows[n] + at)), both = _mm_set1_epi32(pair);
            __m128i other = _mm_loadu_si128((const __m128i *)(rows[n + 1] + at));
            __m128i low = _mm_unpacklo_epi8(one, other), high = _mm_unpackhi_epi8(one, other);
            sums[0] = _mm_add_epi32(sums[0], _mm_madd_epi16(_mm_unpacklo_epi8(low, zero), both));
            sums[1] = _mm_add_epi32(sums[1], _mm_madd_epi16(_mm_unpackhi_epi8(low, zero), both));
            sums[2] = _mm_add_epi32(sums[2], _mm_madd_epi16(_mm_unpacklo_epi8(high, zero), both));
            sums[3] = _mm_add_epi32(sums[3], _mm_madd_epi16(_mm_unpackhi_epi8(high, zero), both));
        }
        for (int n = 0; n < 4; n++)
            sums[n] = _mm_sra_epi32(sums[n], shift);
        __m128i words[2] = {_mm_packs_epi32(sums[0], sums[1]), _mm_packs_epi32(sums[2], sums[3])};
        _mm_storeu_si128((__m128i *)(out + at), _mm_packus_epi16(words[0], words[1]));
    }
}

/* Adds up rows of bytes, of which `length` rounded up to WIDE are read and written. */
static void add_rows(const axis *a, int place, unsigned char *const *rows, size_t length, unsigned char *out) {
    if (a->num_weights == 2) return add_up(a, place, rows, length, out, 2);
    if (a->num_weights == 4) return add_up(a, place, rows, length, out, 4);
    add_up(a, place, rows, length, out, a->num_weights);
}

#else

static unsigned char rounded(const axis *a, int sum) {
    int value = (sum + (1 << a->precision >> 1)) >> a->precision;
    return (unsigned char)(value > 255 ? 255 : value);
}

static void resize_row(const axis *a, const unsigned char *row, size_t num, unsigned char *pairs, unsigned char *out) {
    (void)num, (void)pairs;
    for (int place = 0; place < a->size; place++) {
        for (int colour = 0; colour < 3; colour++) {
            int sum = 0;
            for (int n = 0; n < a->num_weights; n++)
                sum += a->weights[place * a->num_weights + n] * row[4 * (a->first[place] + n) + colour];
            out[3 * place + colour] = rounded(a, sum);
        }
    }
}

static void add_rows(const axis *a, int place, unsigned char *const *rows, size_t length, unsigned char *out) {
    for (size_t at = 0; at < length; at++) {
        int sum = 0;
        for (int n = 0; n < a->num_weights; n++)
            sum += a->weights[place * a->num_weights + n] * rows[n][at];
        out[at] = rounded(a, sum);
    }
}

#endif
