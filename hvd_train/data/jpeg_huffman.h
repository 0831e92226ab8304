/* Reads the Huffman codes of a JPEG file in place of libjpeg, in half of its time.

That is where most of the time of a JPEG file goes. Here a code and the bits of its value are looked up at once, and
what lies beside the part that is asked for is only passed over. libjpeg calls `decode_unit` in the place of its own
function and does all the rest. It serves files of 8 bits with one scan, whose codes stay within those that such files
need; any surprise in the data ends in `give_up`, so that another decoder looks at the file. */

#include <endian.h>
#include <stdint.h>
#include <string.h>

enum { LOOK_RUN = 12, LOOK = 10, LONGEST = 16 };    /* bits of a code: that are looked up at once, and at most */
enum { MOST_DC_BITS = 11, MOST_AC_BITS = 10 };      /* of a value, in a file of 8 bits */
enum { ENOUGH = LONGEST + MOST_DC_BITS, END = 80 }; /* bits of a code with its value; what the end of a block adds */

typedef struct {
    uint64_t word; /* the next bits, from the top */
    int count;     /* how many of them count */
    int borrowed;  /* how many of these lie behind the end of the data: zeros */
    const unsigned char *at, *stop;
} bits;

typedef struct {
    unsigned char total, code, value; /* bits of code and value, of the code, of the value; 0: a longer code, or none */
    unsigned char step;               /* coefficients from the one before to this one */
} symbol;

typedef struct {
    unsigned char total, step; /* of all symbols that fit into the bits that are looked up */
} run;

typedef struct {
    struct huffman_spec spec;
    symbol symbols[1 << LOOK], long_symbols[256];
    run runs[1 << LOOK_RUN];
    int is_filled, has_runs, last_code[LONGEST + 1],
        offset[LONGEST + 1]; /* of each length: the last code or -1; from a code to its symbol */
} table;

typedef struct {
    bits bits;
    int last_dc[MOST_COMPONENTS];
    unsigned column, first_column, last_column; /* of the next unit; of those that are asked for */
    unsigned units_to_restart, restarts;
    const table *dc[MOST_BLOCKS], *ac[MOST_BLOCKS];
} huffman;

/* The tables of the last file, since many files have the same: those of the standard's annex K. */
static _Thread_local table dc_tables[MOST_TABLES], ac_tables[MOST_TABLES];

/* Where coefficient number k of a file lies in a block. Behind the last one are those that the end of a block leads to:
   it writes a zero, and coefficient 63 is zero then. */
static const unsigned char PLACES[END + BLOCK] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,
    14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60,
    61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
};

_Noreturn static void give_up(decompress *picture);

static symbol symbol_of(int length, int code, int is_dc) {
    int value = is_dc ? code : code & 15, step = is_dc ? 0 : value || code == 0xf0 ? (code >> 4) + 1 : END;
    return (symbol){(unsigned char)(length + value), (unsigned char)length, (unsigned char)value, (unsigned char)step};
}

static void fill_runs(table *t) {
    for (unsigned start = 0; start < 1 << LOOK_RUN; start++) {
        run all = {0, 0};
        while (all.step < END) {
            symbol s = t->symbols[(start << all.total & ((1 << LOOK_RUN) - 1)) >> (LOOK_RUN - LOOK)];
            if (!s.total || all.total + s.total > LOOK_RUN || all.step + s.step >= END + BLOCK) break;
            all.total += s.total;
            all.step += s.step;
        }
        t->runs[start] = all;
    }
    t->has_runs = 1;
}

/* Returns 1, or 0 where the table has what files of 8 bits have no need of. libjpeg has found its codes to be sound. */
static int fill(table *t, const struct huffman_spec *spec, int is_dc) {
    if (t->is_filled && !memcmp(&t->spec, spec, sizeof *spec)) {
        if (!is_dc && !t->has_runs) fill_runs(t); /* in vain for a file with tables of its own */
        return 1;
    }
    *t = (table){.spec = *spec};
    int code = 0, number = 0;
    for (int length = 1; length <= LONGEST; length++, code <<= 1) {
        t->offset[length] = number - code;
        for (int n = 0; n < spec->num_codes[length]; n++, code++, number++) {
            if (number > 255 || code >> length) return 0;
            symbol s = symbol_of(length, spec->symbols[number], is_dc);
            if (s.value > (is_dc ? MOST_DC_BITS : MOST_AC_BITS)) return 0;
            t->long_symbols[number] = s;
            if (length > LOOK) continue;
            int shift = LOOK - length;
            for (int tail = 0; tail < 1 << shift; tail++)
                t->symbols[code << shift | tail] = s;
        }
        t->last_code[length] = code - 1;
    }
    return t->is_filled = 1;
}

static void add_bytes(bits *b) {
    while (b->count <= 56) {
        if (b->at == b->stop || (*b->at == 0xff && (b->stop - b->at < 2 || b->at[1]))) { /* the end, or a marker */
            b->borrowed += 8;
        } else {
            b->word |= (uint64_t)*b->at << (56 - b->count);
            b->at += *b->at == 0xff ? 2 : 1;
        }
        b->count += 8;
    }
}

/* Sees to it that there are bits enough for a code and its value. */
static inline void add_bits(bits *b) {
    uint64_t next = UINT64_MAX;
    if (b->stop - b->at >= 8) memcpy(&next, b->at, 8);
    if ((~next - 0x0101010101010101u) & next & 0x8080808080808080u) return add_bytes(b); /* a byte of it is 0xff */
    b->word |= be64toh(next) >> b->count;
    b->at += (63 - b->count) >> 3;
    b->count |= 56;
}

static symbol long_symbol(const bits *b, const table *t, decompress *picture) {
    for (int length = LOOK + 1; length <= LONGEST; length++) {
        int code = (int)(b->word >> (64 - length));
        if (code <= t->last_code[length]) return t->long_symbols[(code + t->offset[length]) & 255];
    }
    give_up(picture);
}

/* Returns the next symbol and writes the value that follows it. */
static inline symbol next_symbol(bits *b, const table *t, int *value, decompress *picture) {
    symbol s = t->symbols[b->word >> (64 - LOOK)];
    if (!s.total) s = long_symbol(b, t, picture);
    uint64_t tail = b->word << s.code;
    int is_negative = -(int)(~tail >> 63);
    *value = (int)(tail >> 1 >> (63 - s.value)) + (is_negative & (1 - (1 << s.value)));
    b->word <<= s.total;
    b->count -= s.total;
    return s;
}

static inline int is_whole(int at) { return at == BLOCK - 1 || at >= END; }

static inline int read_block(bits *b, const table *t, short *block, decompress *picture) {
    int at = 0, value;
    do {
        add_bits(b);
        at += next_symbol(b, t, &value, picture).step;
        block[PLACES[at]] = (short)value;
        if (at >= BLOCK - 1) break;
        at += next_symbol(b, t, &value, picture).step;
        block[PLACES[at]] = (short)value;
    } while (at < BLOCK - 1);
    return is_whole(at);
}

static inline int pass_block(bits *b, const table *t, decompress *picture) {
    int at = 0, value;
    do {
        add_bits(b);
        for (int n = 0; n < 3 && at < BLOCK - 1; n++) {
            run all = t->runs[b->word >> (64 - LOOK_RUN)];
            int next = at + all.step;
            if (all.total && (next < BLOCK || (next >= END && next < END + BLOCK - 1))) {
                b->word <<= all.total;
                b->count -= all.total;
                at = next;
            } else { /* a longer code, or the block ends within the bits that were looked up */
                at += next_symbol(b, t, &value, picture).step;
                break;
            }
        }
    } while (at < BLOCK - 1);
    return is_whole(at);
}

static void restart(huffman *h, decompress *picture) {
    bits *b = &h->bits;
    int is_marker = b->stop - b->at >= 2 && b->at[0] == 0xff && b->at[1] == 0xd0 + (h->restarts++ & 7);
    if (b->count - b->borrowed > 7 || !is_marker) give_up(picture);
    *b = (bits){0, 0, 0, b->at + 2, b->stop};
    memset(h->last_dc, 0, sizeof h->last_dc);
    h->units_to_restart = picture->restart_interval;
}

static int decode_next(huffman *h, block **blocks, decompress *picture) {
    if (picture->restart_interval && h->units_to_restart-- == 0) {
        restart(h, picture);
        h->units_to_restart--;
    }
    int is_seen = blocks && h->column >= h->first_column && h->column <= h->last_column, is_sound = 1;
    h->column = h->column + 1 < picture->units_in_row ? h->column + 1 : 0;
    bits b = h->bits;
    for (int n = 0; n < picture->num_blocks; n++) {
        int change, component = picture->component_of[n];
        add_bits(&b);
        next_symbol(&b, h->dc[n], &change, picture);
        h->last_dc[component] += change;
        if (is_seen) {
            (*blocks[n])[0] = (short)h->last_dc[component];
            is_sound &= read_block(&b, h->ac[n], *blocks[n], picture);
        } else
            is_sound &= pass_block(&b, h->ac[n], picture);
    }
    h->bits = b;
    if (!is_sound || b.borrowed > b.count) give_up(picture);
    return 1;
}

/* Returns whether the file is one for these functions, and makes them ready for the columns of pixels start..stop. */
static int start_huffman(huffman *h, const decompress *picture, unsigned start, unsigned stop) {
    if (picture->precision != 8 || picture->is_progressive || picture->is_arithmetic) return 0;
    if (picture->num_in_scan != picture->num_components || picture->num_in_scan > MOST_COMPONENTS) return 0;
    if (picture->first_coefficient != 0 || picture->last_coefficient != BLOCK - 1) return 0; /* another kind of JPEG */
    unsigned filled_dc = 0, filled_ac = 0; /* bits: the tables that this file has filled */
    for (int n = 0; n < picture->num_blocks; n++) {
        const struct component *component = picture->in_scan[picture->component_of[n]];
        int dc = component->dc_table, ac = component->ac_table;
        if (!(filled_dc >> dc & 1) && !fill(dc_tables + dc, picture->dc_tables[dc], 1)) return 0;
        if (!(filled_ac >> ac & 1) && !fill(ac_tables + ac, picture->ac_tables[ac], 0)) return 0;
        filled_dc |= 1u << dc;
        filled_ac |= 1u << ac;
        h->dc[n] = dc_tables + dc;
        h->ac[n] = ac_tables + ac;
    }
    unsigned unit = 8 * (unsigned)(picture->num_in_scan == 1 ? 1 : picture->widest);
    h->first_column = start / unit;
    h->last_column = (stop - 1) / unit;
    h->units_to_restart = picture->restart_interval;
    h->bits.at = picture->source->next;
    h->bits.stop = h->bits.at + picture->source->length;
    return 1;
}
