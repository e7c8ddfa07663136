// SPDX-License-Identifier: Apache-2.0
// Command-line options.
#include "arguments.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "error.h"

namespace lm {

Arguments::Arguments(std::string usage, std::string purpose) : usage_(std::move(usage)), purpose_(std::move(purpose)) {}

void Arguments::option(const std::string& name, const std::string& value_name, const std::string& value,
                       const std::string& help) {
  options_.push_back({name, value_name, value, help, false, {}});
}

void Arguments::flag(const std::string& name, const std::string& help) {
  options_.push_back({name, "", "", help, true, {}});
}

void Arguments::print_help() const {
  std::printf("usage: %s\n\n%s\n\noptions:\n", usage_.c_str(), purpose_.c_str());
  for (const Option& o : options_) {
    const std::string left = "--" + o.name + (o.is_flag ? "" : " " + o.value_name);
    std::printf("  %-22s %s%s\n", left.c_str(), o.help.c_str(),
                o.value.empty() ? "" : (" (default " + o.value + ")").c_str());
  }
  std::printf("  %-22s %s\n", "--help", "this text");
}

bool Arguments::parse(int count, char** words, bool take_positional) {
  for (int i = 0; i < count; ++i) {
    std::string word = words[i];
    if (word == "--help" || word == "-h") {
      print_help();
      return false;
    }
    if (word.rfind("--", 0) != 0) {
      if (!take_positional) throw Error("'" + word + "' is not understood; --help lists the options");
      positional_.push_back(word);
      continue;
    }
    word.erase(0, 2);
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    Option* found = nullptr;
    for (Option& o : options_) {
      if (o.name == name) found = &o;
    }
    if (!found) throw Error("there is no option --" + name + "; --help lists the options");
    if (found->is_flag) {
      if (equals != std::string::npos) throw Error("--" + name + " takes no value");
      found->values.push_back("");
    } else if (equals != std::string::npos) {
      found->values.push_back(word.substr(equals + 1));
    } else {
      if (++i >= count) throw Error("--" + name + " needs a value");
      found->values.push_back(words[i]);
    }
  }
  return true;
}

const Arguments::Option& Arguments::find(const std::string& name) const {
  for (const Option& o : options_) {
    if (o.name == name) return o;
  }
  throw Error("internal: no option " + name);
}

bool Arguments::given(const std::string& name) const { return !find(name).values.empty(); }

std::string Arguments::text(const std::string& name) const {
  const Option& o = find(name);
  return o.values.empty() ? o.value : o.values.back();
}

std::string Arguments::required(const std::string& name) const {
  const std::string value = text(name);
  if (value.empty()) throw Error("--" + name + " is needed; --help lists the options");
  return value;
}

std::vector<std::string> Arguments::all(const std::string& name) const { return find(name).values; }

int64_t Arguments::integer(const std::string& name, int64_t lowest, int64_t highest) const {
  const std::string value = text(name);
  int64_t n = 0;
  const auto [end, code] = std::from_chars(value.data(), value.data() + value.size(), n);
  if (code != std::errc() || end != value.data() + value.size() || n < lowest || n > highest) {
    throw Error("--" + name + " must be an integer from " + std::to_string(lowest) + " to " + std::to_string(highest) +
                ", not '" + value + "'");
  }
  return n;
}

double Arguments::number(const std::string& name, double lowest, double highest) const {
  const std::string value = text(name);
  char* end = nullptr;
  const double x = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0' || std::isnan(x) || x < lowest || x > highest) {
    char range[80];
    std::snprintf(range, sizeof range, "%g to %g", lowest, highest);
    throw Error("--" + name + " must be a number from " + range + ", not '" + value + "'");
  }
  return x;
}

}  // namespace lm
