/* What is used of libjpeg-turbo. The library is found when the process runs, so there is no header of its own to
include: this file declares the interface of version 6b, which has not changed since 1998. jpeg_CreateDecompress refuses
a caller with another version or another size of the structure. */

#include <stddef.h>

#define VERSION 62
#define STRUCT_SIZE 632                                  /* on 64-bit machines */
enum { GREY = 1, RGB = 2, YCBCR = 3, RGB_AND_FILL = 7 }; /* the last has 4 bytes for a pixel */
enum { BLOCK = 64, MOST_TABLES = 4, MOST_COMPONENTS = 4, MOST_BLOCKS = 10 };

typedef struct decompress decompress;
typedef short block[BLOCK];

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

struct source { /* the bytes that are not read yet */
    const unsigned char *next;
    size_t length;
};

struct huffman_spec { /* how many codes there are of each length in bits, and their symbols */
    unsigned char num_codes[17], symbols[256];
};

struct component {
    int settings[5], dc_table, ac_table;
};

struct entropy_decoder {
    void (*start_pass)(decompress *);
    int (*decode_unit)(decompress *, block **); /* the blocks of a unit are cleared before; NULL: pass over them */
};

struct decompress {
    struct errors *errors;
    void *memory, *progress, *client;
    int is_decompressor, state;
    struct source *source;
    unsigned width, height;
    int num_components, colours, wanted_colours;
    unsigned scale[2];
    double gamma;
    int settings[12];
    unsigned output_width, output_height;
    char output[88];
    struct huffman_spec *dc_tables[MOST_TABLES], *ac_tables[MOST_TABLES];
    int precision;
    struct component *components;
    int is_progressive, is_arithmetic;
    char arithmetic[48];
    unsigned restart_interval;
    char markers[36];
    int widest, highest; /* of the components, in blocks of a unit */
    char sizes[16];
    int num_in_scan;
    struct component *in_scan[MOST_COMPONENTS];
    unsigned units_in_row, unit_rows;
    int num_blocks; /* in a unit; the number of the component of each follows */
    int component_of[MOST_BLOCKS];
    int first_coefficient, last_coefficient, high_bit, low_bit;
    int marker;
    void *parts[6];
    struct entropy_decoder *entropy;
    void *more_parts[4];
};

_Static_assert(sizeof(decompress) == STRUCT_SIZE, "not a 64-bit machine");
_Static_assert(offsetof(decompress, entropy) == 592, "not the structure of libjpeg");
