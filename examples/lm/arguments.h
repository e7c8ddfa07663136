// SPDX-License-Identifier: Apache-2.0
// Command-line options: --name value, --name=value, and flags. Knows each option's help text, refuses unknown ones.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lm {

class Arguments {
 public:
  // `usage` is the first line of the help, `purpose` one or two lines on what the command does.
  Arguments(std::string usage, std::string purpose);
  // An option with a value; `value` is the default as text (shown in the help), empty for none.
  void option(const std::string& name, const std::string& value_name, const std::string& value, const std::string& help);
  void flag(const std::string& name, const std::string& help);
  // Takes the words after the command. False: --help was asked for and printed. Throws Error on anything unknown.
  bool parse(int count, char** words, bool take_positional = false);

  bool given(const std::string& name) const;  // by the user
  std::string text(const std::string& name) const;
  std::string required(const std::string& name) const;
  std::vector<std::string> all(const std::string& name) const;  // of an option given several times
  int64_t integer(const std::string& name, int64_t lowest, int64_t highest) const;
  double number(const std::string& name, double lowest, double highest) const;
  bool flagged(const std::string& name) const { return given(name); }
  const std::vector<std::string>& positional() const { return positional_; }

 private:
  struct Option {
    std::string name, value_name, value, help;
    bool is_flag = false;
    std::vector<std::string> values;
  };
  void print_help() const;
  const Option& find(const std::string& name) const;

  std::string usage_, purpose_;
  std::vector<Option> options_;
  std::vector<std::string> positional_;
};

}  // namespace lm
