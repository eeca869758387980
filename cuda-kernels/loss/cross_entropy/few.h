// The losses of few long rows.
#pragma once

#include "args.h"

// Whether rows are so few and so long that cross_entropy_few takes them.
bool are_few_rows(const CrossEntropyArgs& args);

// Needs args.memory. M is not 0.
void cross_entropy_few(const CrossEntropyArgs& args);
