// Where the rows of a kernel's matrices start.
#pragma once

enum class Alignment {
  ELEMENT,  // anywhere
  PACK,     // in every matrix at multiples of 16 bytes, and rows are whole packs
  LINE,     // so, and those of x on lines
};
