// SPDX-License-Identifier: Apache-2.0
// A small line plot as SVG: axes, ticks, grid, legend.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lm {

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // by rising x
};

struct Plot {
  std::string title, x_label, y_label;
  bool log2_x = false;  // x > 0 then
  std::vector<Series> series;
};

std::string svg_plot(const Plot& plot);

}  // namespace lm
