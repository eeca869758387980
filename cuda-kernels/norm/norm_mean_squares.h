// What the blocks of a cluster tell each other of their parts of a row.
#pragma once

// The statistics of a row or of a part of it: 8 bytes, so that one st.async sends both.
struct alignas(8) MeanSquares {
  float mean, squares;  // squares: the sum of squared distances from this mean
};
