// What the last steps of matmul_bf16 and linear launch for a product, in words.
#pragma once

#include <string>

#include "args.h"

// The tile and how K is split, on the current device; args' pointers are only asked for their alignment.
// `as_linear`: operands whose lines do not run along K are repacked. Sizes are not 0.
std::string matmul_bf16_configuration(const MatmulBf16Args& args, bool as_linear);
