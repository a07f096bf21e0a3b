#define WIDE_QUADS 2
#include "moe_decode_wide.cu"
