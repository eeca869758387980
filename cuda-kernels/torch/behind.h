// The steps behind an operation's public function, as its spec lists them. Free of torch, since the generated
// step table includes it.
#pragma once

#include <span>
#include <string_view>

namespace kernel_twins {

// Their names in order of preference: a call takes the first that the GPU and its sizes allow. Empty if the
// operation has no public function.
std::span<const char* const> behind(std::string_view op);

}  // namespace kernel_twins
