/* Gives the decoder of JPEG parts files that nobody should have written. Built with sanitizers by
   tests/support/fuzz.py.

       fuzz_jpeg LIBJPEG SECONDS SEED REPORT FILE...

   Each FILE is decoded as it is; then, for SECONDS, changed copies of them. Where a sanitizer ends the process, or an
   input takes more than 20 seconds, that input is written to the file REPORT. Prints how many inputs there were. */

#include "../../hvd_train/data/jpeg_region.c"

#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <sanitizer/common_interface_defs.h>

enum { MOST_BYTES = 1 << 16, MOST_PIXELS = 1 << 20, MOST_SIDE = 99, MOST_SECONDS = 20 };

static unsigned char input[MOST_BYTES];
static size_t length;
static const char *report;
static uint64_t random_state;

static unsigned below(unsigned limit) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (unsigned)(random_state >> 32) % limit;
}

static int pick(int most) { return 1 + (int)below((unsigned)most); }

static void keep_input(void) {
    FILE *file = fopen(report, "wb");
    if (!file) return;
    fwrite(input, 1, length, file);
    fclose(file);
}

/* Decodes some parts of the input as Python would, resized or not: into memory that ends where the window ends. */
static void try_input(void) {
    int size[2];
    unsigned char *data = malloc(length ? length : 1); /* so that a read behind its end is seen */
    memcpy(data, input, length);
    alarm(MOST_SECONDS);
    if (!region_size(data, length, size) && (long)size[0] * size[1] <= MOST_PIXELS) {
        for (int n = 0; n < 3; n++) {
            frame f = {.width = pick(size[0]), .height = pick(size[1]), .is_mirrored = n == 1};
            f.left = pick(size[0] - f.width + 1) - 1;
            f.top = pick(size[1] - f.height + 1) - 1;
            f.resized_width = n ? pick(MOST_SIDE) : f.width;
            f.resized_height = n ? pick(MOST_SIDE) : f.height;
            f.window_width = pick(f.resized_width);
            f.window_height = pick(f.resized_height);
            f.window_left = pick(f.resized_width - f.window_width + 1) - 1;
            f.window_top = pick(f.resized_height - f.window_height + 1) - 1;
            if (below(8) == 0) *(&f.left + below(8)) += pick(3) - 2; /* perhaps not in the image, or in the part */
            unsigned char *out = malloc((size_t)f.window_width * (size_t)f.window_height * 3);
            region_decode(data, length, &f, out);
            free(out);
        }
    }
    free(data);
}

static void change(void) {
    static const unsigned char telling[] = {0x00, 0x01, 0x7f, 0x80, 0xff, 0xc0, 0xc2, 0xc4, 0xd0, 0xd9, 0xda, 0xdb};
    for (unsigned n = 1 + below(6); n && length > 4; n--) {
        unsigned at = below((unsigned)length), kind = below(8);
        if (kind < 3)
            input[at] = (unsigned char)below(256);
        else if (kind < 5)
            input[at] = telling[below(sizeof telling)];
        else if (kind == 5)
            input[at] ^= (unsigned char)(1u << below(8));
        else { /* take a piece out, or repeat it */
            size_t piece = 1 + below(32), rest = length - at;
            if (piece > rest) piece = rest;
            if (kind == 6)
                memmove(input + at, input + at + piece, rest - piece), length -= piece;
            else if (length + piece <= MOST_BYTES)
                memmove(input + at + piece, input + at, rest), length += piece;
        }
    }
}

static int take(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return 0;
    length = fread(input, 1, MOST_BYTES, file);
    fclose(file);
    return 1;
}

int main(int count, char **arguments) {
    if (count < 6 || !region_library(arguments[1])) return fputs("no library or no files\n", stderr), 2;
    time_t end = time(NULL) + atol(arguments[2]);
    random_state = strtoull(arguments[3], NULL, 10) * 2654435761u + 88172645463325252u;
    report = arguments[4];
    __sanitizer_set_death_callback(keep_input);
    unsigned long inputs = 0;
    for (int n = 5; n < count; n++, inputs++) {
        if (!take(arguments[n])) return fprintf(stderr, "cannot read %s\n", arguments[n]), 2;
        try_input();
    }
    for (; time(NULL) < end; inputs++) {
        take(arguments[5 + below((unsigned)(count - 5))]);
        change();
        try_input();
    }
    printf("%lu inputs\n", inputs);
    return 0;
}
