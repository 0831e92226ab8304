/* Decodes a part of a JPEG file with the libjpeg-turbo that Pillow brings along.

Rows below the part are not read; rows above it and columns beside it are entropy-decoded only. This is C because
libjpeg reports errors by calling a function that must not return, and Python cannot provide one. The library is found
when the process runs, so there is no header to include: this file declares what it uses of the interface of version 6b,
which has not changed since 1998. jpeg_CreateDecompress refuses a caller with another version or another size of the
structure. */

#include <dlfcn.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 62
#define STRUCT_SIZE 632 /* on 64-bit machines */
enum { GREY = 1, RGB = 2, YCBCR = 3 };
enum { MARGIN = 4 }; /* decoded beside the part, too: smooth upsampling of colour reads neighbours */

typedef struct decompress decompress;

struct errors {
    void (*error_exit)(decompress *);
    void (*emit_message)(decompress *, int);
    void (*output_message)(decompress *);
    void (*format_message)(decompress *, char *);
    void (*reset)(decompress *);
    int code;
    char parameters[80];
    int trace_level;
    long num_warnings;
    char rest[32];
};

struct decompress {
    struct errors *errors;
    void *memory, *progress, *client;
    int is_decompressor, state;
    void *source;
    unsigned width, height;
    int num_components, colours, wanted_colours;
    unsigned scale[2];
    double gamma;
    int settings[12];
    unsigned output_width, output_height;
    char rest[STRUCT_SIZE - 144];
};

_Static_assert(sizeof(decompress) == STRUCT_SIZE, "not a 64-bit machine");

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
    unsigned char *row;
} reader;

static void give_up(decompress *picture) { longjmp(((reader *)picture->errors)->back, 1); }

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

/* Frees everything. Returns 0 where the result is sound: nothing failed and libjpeg gave no warning. */
static int finish(reader *r, int failed) {
    int is_unsound = failed || r->errors.num_warnings > 0;
    jpeg.destroy(&r->picture);
    free(r->row);
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

/* Writes the pixels [height, width, 3] of a part to `out`; the part must lie in the image. Returns 0, or 1 as above. */
int region_decode(const unsigned char *data, size_t length, unsigned left, unsigned top, unsigned width,
                  unsigned height, unsigned char *out) {
    reader *r = calloc(1, sizeof *r);
    if (!r) return 1;
    if (setjmp(r->back)) return finish(r, 1);
    open_header(r, data, length);
    r->picture.wanted_colours = RGB;
    jpeg.start(&r->picture);
    unsigned whole = r->picture.output_width;
    unsigned start = left < MARGIN ? 0 : left - MARGIN, stop = left + width + MARGIN;
    unsigned columns = (stop < whole ? stop : whole) - start;
    if (columns < whole) jpeg.crop(&r->picture, &start, &columns); /* moves both to the grid of blocks */
    if (!(r->row = malloc((size_t)columns * 3))) return finish(r, 1);
    if (top) jpeg.skip(&r->picture, top);
    for (unsigned y = 0; y < height; y++) {
        jpeg.read(&r->picture, &r->row, 1);
        memcpy(out + (size_t)y * width * 3, r->row + (size_t)(left - start) * 3, (size_t)width * 3);
    }
    return finish(r, 0);
}
