/* What a rank does with its shard of the weights in a step, in one pass over memory each: it adds up the gradients of
   the ranks (shard_sum), and takes a step of stochastic gradient descent (shard_sgd).

   There are no instructions of one processor here: the compiler makes vectors of the loops. */

#include <stdint.h>
#include <string.h>

enum {
    BLOCK = 512, /* numbers: with what they were before in the log, they fit into the first cache */
    LINE = 16,   /* numbers: a line of the cache */
    AHEAD = 256, /* numbers: how far ahead memory is asked for */
    LANES = 8,   /* sums of squares that are kept apart, for vectors */
};

/* Elements of one parameter, counted from the first one of all parameters; its group; how their update is rounded. */
typedef struct {
    int64_t begin, end, group, form;
} part;

/* The settings of a group of parameters. */
typedef struct {
    float decay, momentum, rate;
    int32_t nesterov;
} settings;

#define INLINE static inline __attribute__((always_inline))

/* Put `count` sums of the ranks' numbers, added in the order of ranks, into `sums`, and return the sum of their
   squares. `sums` may be one of the first two rows. */
static double add(float *sums, const float *const *rows, int64_t ranks, int64_t count) {
    const float *one = rows[0], *two = rows[1];
    double lanes[LANES] = {0}, total = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        float here[LANES];
        __builtin_prefetch(one + i + AHEAD);
        __builtin_prefetch(two + i + AHEAD);
        for (int lane = 0; lane < LANES; lane++)
            here[lane] = one[i + lane] + two[i + lane];
        for (int64_t rank = 2; rank < ranks; rank++)
            for (int lane = 0; lane < LANES; lane++)
                here[lane] += rows[rank][i + lane];
        for (int lane = 0; lane < LANES; lane++)
            sums[i + lane] = here[lane];
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += (double)here[lane] * here[lane];
    }
    for (; i < count; i++) {
        float here = one[i] + two[i];
        for (int64_t rank = 2; rank < ranks; rank++)
            here += rows[rank][i];
        sums[i] = here;
        total += (double)here * here;
    }
    for (int lane = 0; lane < LANES; lane++)
        total += lanes[lane];
    return total;
}

/* Add up the gradients of parts of the weights, and return the sum of the squares of the sums.

   rows[rank] has the gradients of a rank in common memory, but own_parts[i] has those of rank `own` of parts[i]. The
   sums go into rows[place], where `place` is 0 or 1 and not `own`. */
double shard_sum(const part *parts, int64_t num_parts, float *const *rows, int64_t ranks, int64_t own, int64_t place,
                 const float *const *own_parts) {
    double total = 0;
    const float *here[ranks];
    for (int64_t i = 0; i < num_parts; i++) {
        int64_t begin = parts[i].begin;
        for (int64_t rank = 0; rank < ranks; rank++)
            here[rank] = rows[rank] + begin;
        here[own] = own_parts[i];
        total += add(rows[place] + begin, here, ranks, parts[i].end - begin);
    }
    return total;
}

INLINE float multiply_add(int together, float a, float b, float c) {
    return together ? __builtin_fmaf(a, b, c) : a * b + c;
}

/* Update a block. What is an int here is a constant to the compiler: it makes a loop without a branch of each case. */
INLINE void descend(int is_scaled, int decays, int has_momentum, int nesterov, int momentum_together, int rest_together,
                    settings of, float factor, float *restrict weights, float *restrict momenta,
                    const float *restrict sums, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float step = sums[i], weight = weights[i];
        if (is_scaled) step *= factor;
        if (decays) step = multiply_add(rest_together, weight, of.decay, step);
        if (has_momentum) {
            float momentum = multiply_add(momentum_together, momenta[i], of.momentum, step);
            momenta[i] = momentum;
            step = nesterov ? multiply_add(rest_together, momentum, of.momentum, step) : momentum;
        }
        weights[i] = multiply_add(rest_together, step, -of.rate, weight);
    }
}

#define CASE(SCALED, DECAYS, MOMENTUM, NESTEROV)                                                                       \
    if ((factor != NULL) == SCALED && (of.decay != 0) == DECAYS && (of.momentum != 0) == MOMENTUM &&                   \
        (of.momentum != 0 && of.nesterov) == NESTEROV)                                                                 \
    return descend(SCALED, DECAYS, MOMENTUM, NESTEROV, momentum_together, rest_together, of, factor ? *factor : 1,     \
                   weights, momenta, sums, count)

INLINE void choose(int momentum_together, int rest_together, settings of, const float *factor, float *weights,
                   float *momenta, const float *sums, int64_t count) {
    CASE(0, 0, 0, 0);
    CASE(0, 0, 1, 0);
    CASE(0, 0, 1, 1);
    CASE(0, 1, 0, 0);
    CASE(0, 1, 1, 0);
    CASE(0, 1, 1, 1);
    CASE(1, 0, 0, 0);
    CASE(1, 0, 1, 0);
    CASE(1, 0, 1, 1);
    CASE(1, 1, 0, 0);
    CASE(1, 1, 1, 0);
    CASE(1, 1, 1, 1);
}

#if defined __x86_64__ && !defined __FP_FAST_FMAF
#define TOGETHER __attribute__((target("avx2,fma")))
static int can_round_together(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
#define TOGETHER
static int can_round_together(void) {
#ifdef __FP_FAST_FMAF
    return 1;
#else
    return 0;
#endif
}
#endif

/* The forms of an update: products are rounded before they are added, or together with the sum, or all together but for
   that of the momentum. Which of them torch has depends on the processor and on the compiler that has made it. */
enum { APART, MOMENTUM_APART, ALL_TOGETHER };

#define ARGUMENTS settings of, const float *factor, float *weights, float *momenta, const float *sums, int64_t count

static void apart(ARGUMENTS) { choose(0, 0, of, factor, weights, momenta, sums, count); }
TOGETHER static void momentum_apart(ARGUMENTS) { choose(0, 1, of, factor, weights, momenta, sums, count); }
TOGETHER static void all_together(ARGUMENTS) { choose(1, 1, of, factor, weights, momenta, sums, count); }

/* Return how many of the forms this processor has. */
int shard_forms(void) { return can_round_together() ? 3 : 1; }

/* Return how many numbers a block has. */
int shard_block(void) { return BLOCK; }

/* Copy a block of two rows at once, so that memory has to be waited for once. */
static void keep(float *restrict log, const float *restrict weights, const float *restrict momenta, int64_t count) {
    int64_t i = 0;
    for (; i + LINE <= count; i += LINE) {
        __builtin_prefetch(weights + i + AHEAD);
        __builtin_prefetch(momenta + i + AHEAD);
        for (int64_t k = i; k < i + LINE; k++)
            log[k] = weights[k];
        for (int64_t k = i; k < i + LINE; k++)
            log[count + k] = momenta[k];
    }
    for (; i < count; i++)
        log[i] = weights[i], log[count + i] = momenta[i];
}

/* Write a word after all that is written before it, and before all that is written after it, whoever looks. */
static void write_word(int64_t *word, int64_t value) {
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

/* Update the blocks of a shard from number `first` on, counted through all parts.

   While *word is `step | n << 1 | 1`, block n is being updated, and what it was before is in `log`: with `is_open` that
   is so for the first one, which is brought back. Then *word is `step | (n + 1) << 1`. `momenta` is NULL where there
   are none, `factor` where it is 1. */
void shard_sgd(int64_t *word, int64_t step, int64_t first, int is_open, const part *parts, int64_t num_parts,
               const settings *groups, const float *factor, float *weights, float *momenta, const float *sums,
               float *log) {
    int64_t number = 0;
    for (int64_t i = 0; i < num_parts; i++) {
        settings of = groups[parts[i].group];
        for (int64_t at = parts[i].begin; at < parts[i].end; at += BLOCK, number++) {
            int64_t count = parts[i].end - at < BLOCK ? parts[i].end - at : BLOCK;
            float *moving = momenta ? momenta + at : NULL;
            if (number < first) continue;
            if (number == first && is_open) {
                memcpy(weights + at, log, count * sizeof(float));
                if (moving) memcpy(moving, log + count, count * sizeof(float));
            } else if (moving) {
                keep(log, weights + at, moving, count);
            } else {
                memcpy(log, weights + at, count * sizeof(float));
            }
            write_word(word, step | number << 1 | 1);
            switch (parts[i].form) {
            case APART:
                apart(of, factor, weights + at, moving, sums + at, count);
                break;
            case MOMENTUM_APART:
                momentum_apart(of, factor, weights + at, moving, sums + at, count);
                break;
            default:
                all_together(of, factor, weights + at, moving, sums + at, count);
            }
            write_word(word, step | (number + 1) << 1);
        }
    }
    write_word(word, step | number << 1);
}
