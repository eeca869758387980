// The gradient of x alone, through dropout_add.
#pragma once

#include "args.h"

// dbias is null, and dx is not.
void dropout_add_backward_dx(const DropoutAddBackwardArgs& args);
