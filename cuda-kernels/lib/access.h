// How a kernel accesses its matrices: one element at a time, or a pack of 16 bytes.
#pragma once

enum class Access { ELEMENTS, PACKS };
