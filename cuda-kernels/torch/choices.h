// Choices of backend="auto" that are kept, see choices.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace kernel_twins {

// A builtin function that takes what choose takes, by position, and returns what it returned for such a call
// before.
pybind11::object kept(pybind11::object choose);

// Whether this thread's calls ask anew what to choose, and keep nothing; returns what was set before.
bool ask_anew(bool anew);

}  // namespace kernel_twins
