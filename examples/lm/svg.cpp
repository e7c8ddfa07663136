// SPDX-License-Identifier: Apache-2.0
// Line plots as SVG.
#include "svg.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace lm {
namespace {

constexpr double kWidth = 720, kHeight = 460, kLeft = 72, kRight = 24, kTop = 68, kBottom = 60;
// Distinct in colour and, for eyes and printers that see none, in stroke.
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7"};
constexpr const char* kStrokes[] = {"none", "7 4", "2 3", "9 3 2 3"};

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

template <class... Values>
void append(std::string* out, const char* format, Values... values) {
  char line[512];
  std::snprintf(line, sizeof line, format, values...);
  *out += line;
}

// A step of 1, 2 or 5 times a power of ten that cuts the range into about `pieces`.
double nice_step(double range, int pieces) {
  const double raw = range / pieces, power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) return factor * power;
  }
  return 10 * power;
}

}  // namespace

std::string svg_plot(const Plot& plot) {
  double x0 = INFINITY, x1 = -INFINITY, y0 = INFINITY, y1 = -INFINITY;
  const auto place = [&](double x) { return plot.log2_x ? std::log2(x) : x; };
  for (const Series& s : plot.series) {
    for (const auto& [x, y] : s.points) {
      x0 = std::min(x0, place(x));
      x1 = std::max(x1, place(x));
      y0 = std::min(y0, y);
      y1 = std::max(y1, y);
    }
  }
  if (!(x0 <= x1)) x0 = 0, x1 = 1, y0 = 0, y1 = 1;
  if (x1 - x0 < 1e-9) x1 = x0 + 1;
  if (y1 - y0 < 1e-9) y1 = y0 + 1;
  const double y_step = nice_step(y1 - y0, 6);
  y0 = std::floor(y0 / y_step) * y_step;
  y1 = std::ceil(y1 / y_step) * y_step;
  const auto px = [&](double x) { return kLeft + (x - x0) / (x1 - x0) * (kWidth - kLeft - kRight); };
  const auto py = [&](double y) { return kHeight - kBottom - (y - y0) / (y1 - y0) * (kHeight - kTop - kBottom); };

  std::string out;
  append(&out,
         "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" font-size=\"13\">\n",
         kWidth, kHeight);
  append(&out, "<rect width=\"%g\" height=\"%g\" fill=\"white\"/>\n", kWidth, kHeight);
  append(&out, "<text x=\"%g\" y=\"26\" text-anchor=\"middle\" font-size=\"16\">", kWidth / 2);
  out += escaped(plot.title) + "</text>\n";

  const double x_step = plot.log2_x ? std::max(1.0, std::ceil((x1 - x0) / 12)) : nice_step(x1 - x0, 8);
  const double x_first = std::ceil(x0 / x_step - 1e-9) * x_step;
  for (int i = 0;; ++i) {
    const double x = x_first + i * x_step;
    if (!(x <= x1 + 1e-9)) break;
    append(&out, "<line x1=\"%.1f\" y1=\"%g\" x2=\"%.1f\" y2=\"%g\" stroke=\"#ddd\"/>\n", px(x), kTop, px(x),
           kHeight - kBottom);
    append(&out, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%g</text>\n", px(x), kHeight - kBottom + 18,
           plot.log2_x ? std::exp2(x) : x);
  }
  for (int i = 0;; ++i) {
    const double y = y0 + i * y_step;
    if (!(y <= y1 + y_step / 2)) break;
    append(&out, "<line x1=\"%g\" y1=\"%.1f\" x2=\"%g\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", kLeft, py(y), kWidth - kRight,
           py(y));
    append(&out, "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%.4g</text>\n", kLeft - 8, py(y) + 4.5,
           std::fabs(y) < y_step / 1000 ? 0.0 : y);
  }
  append(&out, "<path d=\"M%g %g V%g H%g\" fill=\"none\" stroke=\"black\"/>\n", kLeft, kTop, kHeight - kBottom,
         kWidth - kRight);
  append(&out, "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">", (kLeft + kWidth - kRight) / 2, kHeight - 16);
  out += escaped(plot.x_label) + "</text>\n";
  append(&out, "<text transform=\"translate(20 %g) rotate(-90)\" text-anchor=\"middle\">", (kTop + kHeight - kBottom) / 2);
  out += escaped(plot.y_label) + "</text>\n";

  for (size_t i = 0; i < plot.series.size(); ++i) {
    const char* colour = kColours[i % 4];
    const char* stroke = kStrokes[i % 4];
    std::string points;
    for (const auto& [x, y] : plot.series[i].points) append(&points, "%.1f,%.1f ", px(place(x)), py(y));
    out += "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" + std::string(colour) + "\" stroke-dasharray=\"" + stroke +
           "\" points=\"" + points + "\"/>\n";
    // The legend stands in a row above the plot, where no line can cross it.
    const double x = kLeft + static_cast<double>(i) * (kWidth - kLeft - kRight) / static_cast<double>(plot.series.size()),
                 y = 50;
    append(&out,
           "<line x1=\"%g\" y1=\"%g\" x2=\"%g\" y2=\"%g\" stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\"/>\n", x,
           y, x + 32, y, colour, stroke);
    append(&out, "<text x=\"%g\" y=\"%g\">", x + 40, y + 4.5);
    out += escaped(plot.series[i].name) + "</text>\n";
  }
  return out + "</svg>\n";
}

}  // namespace lm
