// The forward pass where rows of x or of the residual start anywhere within 16 bytes.
#pragma once

#include "args.h"

// For matrices that are_shifted_packs.
void dropout_add_shifted(const DropoutAddArgs& args);
