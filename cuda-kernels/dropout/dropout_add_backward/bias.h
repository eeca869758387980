// The gradient of bias alone, through dropout_add.
#pragma once

#include "args.h"

// dx is null, and dbias is not. M and N are not 0.
void dropout_add_backward_bias(const DropoutAddBackwardArgs& args);
