/* Decodes a part of a JPEG file with the libjpeg-turbo that Pillow brings along.

Rows below the part are not read; rows above it and columns beside it are entropy-decoded only. This is C because
libjpeg reports errors by calling a function that must not return, and Python cannot provide one. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "jpeg_library.h"

#include "jpeg_huffman.h"
#include "jpeg_resize.h"

enum { MARGIN = 4 }; /* decoded beside the part, too: smooth upsampling of colour reads neighbours */

static struct {
    struct errors *(*std_error)(struct errors *);
    void (*create)(decompress *, int, size_t);
    void (*read_memory)(decompress *, const unsigned char *, unsigned long);
    int (*read_header)(decompress *, int);
    int (*start)(decompress *);
    void (*crop)(decompress *, unsigned *, unsigned *);
    unsigned (*skip)(decompress *, unsigned);
    unsigned (*read)(decompress *, unsigned char **, unsigned);
    void (*destroy)(decompress *);
} jpeg;

typedef struct {
    struct errors errors;
    jmp_buf back;
    decompress picture;
    huffman huffman;
    axis x, y;
    unsigned char *row, *pairs;    /* a decoded row: its pixels, and each of them beside the next */
    unsigned char *lines, **order; /* rows that are resized along x, and which of them are added up */
} reader;

_Noreturn static void give_up(decompress *picture) { longjmp(((reader *)picture->errors)->back, 1); }

static void count_warnings(decompress *picture, int level) {
    if (level < 0) picture->errors->num_warnings++;
}

static void open_header(reader *r, const unsigned char *data, size_t length) {
    r->picture.errors = jpeg.std_error(&r->errors);
    r->errors.error_exit = give_up;
    r->errors.emit_message = count_warnings;
    jpeg.create(&r->picture, VERSION, STRUCT_SIZE);
    jpeg.read_memory(&r->picture, data, length);
    jpeg.read_header(&r->picture, 1);
    if (r->picture.colours < GREY || r->picture.colours > YCBCR) give_up(&r->picture);
}

static int decode_unit(decompress *picture, block **blocks) {
    return decode_next(&((reader *)picture->errors)->huffman, blocks, picture);
}

/* Returns whether the structure behind `entropy`, which no header shows, has a function of the library where we think.
 */
static int is_as_known(const decompress *picture) {
    static int (*known)(decompress *, block **);
    Dl_info theirs, library;
    if (picture->entropy->decode_unit == known) return 1;
    if (!dladdr((void *)picture->entropy->decode_unit, &theirs) || !dladdr((void *)jpeg.start, &library)) return 0;
    if (theirs.dli_fbase != library.dli_fbase) return 0;
    known = picture->entropy->decode_unit;
    return 1;
}

/* Frees everything. Returns 0 where the result is sound: nothing failed and libjpeg gave no warning. */
static int finish(reader *r, int failed) {
    int is_unsound = failed || r->errors.num_warnings > 0;
    jpeg.destroy(&r->picture);
    free_axis(&r->x);
    free_axis(&r->y);
    free(r->row);
    free(r->pairs);
    free(r->lines);
    free(r->order);
    free(r);
    return is_unsound;
}

/* Loads the library at this path (NULL: what the process has loaded). Returns 1 where it has all functions, else 0. */
int region_library(const char *path) {
    static const char *const names[] = {
        "jpeg_std_error",      "jpeg_CreateDecompress", "jpeg_mem_src",
        "jpeg_read_header",    "jpeg_start_decompress", "jpeg_crop_scanline",
        "jpeg_skip_scanlines", "jpeg_read_scanlines",   "jpeg_destroy_decompress",
    };
    void **functions = (void **)&jpeg, *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (size_t n = 0; n < sizeof names / sizeof *names; n++)
        if (!library || !(functions[n] = dlsym(library, names[n]))) return 0;
    return 1;
}

/* Writes width and height in pixels to `size`. Returns 0, or 1 where another decoder must look at the file. */
int region_size(const unsigned char *data, size_t length, int *size) {
    reader *r = calloc(1, sizeof *r);
    if (!r) return 1;
    if (setjmp(r->back)) return finish(r, 1);
    open_header(r, data, length);
    size[0] = (int)r->picture.width;
    size[1] = (int)r->picture.height;
    return finish(r, 0);
}

/* What is seen of an image: a part, resized, and of that a window, mirrored or not. As `Frame` in coded.py. */
typedef struct {
    int left, top, width, height, resized_height, resized_width, window_top, window_left, window_height, window_width;
    int is_mirrored;
} frame;

static int lies_in(int start, int size, int whole) { return start >= 0 && size > 0 && size <= whole - start; }

static int is_sound(const frame *f, const decompress *picture) {
    int is_in_image =
        lies_in(f->left, f->width, (int)picture->width) && lies_in(f->top, f->height, (int)picture->height);
    int is_in_part = lies_in(f->window_left, f->window_width, f->resized_width) &&
                     lies_in(f->window_top, f->window_height, f->resized_height);
    return is_in_image && is_in_part;
}

/* Decodes the rows and columns that the window is made of, one row at a time, and resizes it as soon as it is read. */
static void decode(reader *r, const frame *f, unsigned char *out) {
    decompress *picture = &r->picture;
    axis *x = &r->x, *y = &r->y;
    if (!make_axis(x, f->width, f->resized_width, f->window_left, f->window_width, f->is_mirrored)) give_up(picture);
    if (!make_axis(y, f->height, f->resized_height, f->window_top, f->window_height, 0)) give_up(picture);
    picture->wanted_colours = RGB_AND_FILL;
    jpeg.start(picture);
    unsigned whole = picture->output_width, left = (unsigned)f->left, first = left + (unsigned)first_of(x);
    unsigned start = first < MARGIN ? 0 : first - MARGIN, stop = left + (unsigned)last_of(x) + MARGIN;
    unsigned columns = (stop < whole ? stop : whole) - start;
    if (columns < whole) jpeg.crop(picture, &start, &columns); /* moves both to the grid of blocks */
    if (is_as_known(picture) && start_huffman(&r->huffman, picture, start, start + columns))
        picture->entropy->decode_unit = decode_unit;

    /* Behind the last pixel there is room for those that have no weight. */
    size_t length = (size_t)f->window_width * 3, line = (length + WIDE) / WIDE * WIDE;
    size_t num_lines = (size_t)y->num_weights;
    size_t num = columns + (size_t)x->num_weights;
    r->row = calloc(1 + num + WIDE / 4, 4);
    r->pairs = malloc((num + WIDE / 4) * 8);
    r->lines = calloc(num_lines + 1, line);
    r->order = calloc(num_lines, sizeof *r->order);
    if (!r->row || !r->pairs || !r->lines || !r->order) give_up(picture);
    unsigned char *row = r->row + 4; /* libjpeg writes past the cache where a row is aligned to 16 or 32 bytes */
    for (int place = 0; place < x->size; place++)
        x->first[place] += (int)(left - start);
    if (f->top + y->first[0]) jpeg.skip(picture, (unsigned)(f->top + y->first[0]));
    for (int place = 0, read = y->first[0]; place < y->size; place++) {
        int needed = y->first[place] + y->num_weights;
        for (; read < needed && read < f->height; read++) {
            jpeg.read(picture, &row, 1);
            resize_row(x, row, num, r->pairs, r->lines + (size_t)read % num_lines * line);
        }
        for (size_t n = 0; n < num_lines; n++)
            r->order[n] = r->lines + ((size_t)y->first[place] + n) % num_lines * line;
        unsigned char *sums = r->lines + num_lines * line;
        add_rows(y, place, r->order, length, sums);
        memcpy(out + (size_t)place * length, sums, length);
    }
}

/* Writes the pixels [window_height, window_width, 3] of a window to `out`; the part must lie in the image and the
   window in the resized part. Returns 0, or 1 as above. */
int region_decode(const unsigned char *data, size_t length, const frame *seen, unsigned char *out) {
    reader *r = calloc(1, sizeof *r);
    if (!r) return 1;
    if (setjmp(r->back)) return finish(r, 1);
    open_header(r, data, length);
    if (!is_sound(seen, &r->picture)) give_up(&r->picture);
    decode(r, seen, out);
    return finish(r, 0);
}
