#define FEW_STEP 2
#include "moe_decode_few.cu"
