// What the last steps of matmul_bf16 and linear launch for a product, in words.
#pragma once

#include <string>

#include "args.h"

// The tile and how K is split, on the current device; args' pointers are only asked for their alignment.
// `along_k`: as linear, which repacks operands whose lines do not run along K. Sizes are not 0.
std::string matmul_bf16_configuration(const MatmulBf16Args& args, bool along_k);
