# SPDX-License-Identifier: Apache-2.0
# Runs the vcpkg port with stand-ins for the helpers that it calls, which do what vcpkg's own do for a release build. It shows that
# the port's calls fit the library's build; it does not replace a run of vcpkg.
#   cmake -DPORT=packaging/vcpkg -DWORK=... -DVCPKG_LIBRARY_LINKAGE=static|dynamic "-DFEATURES=tools" -P tests/full/vcpkg_port.cmake
cmake_minimum_required(VERSION 3.25)
get_filename_component(PORT "${PORT}" ABSOLUTE)
set(CURRENT_BUILDTREES_DIR ${WORK})
set(CURRENT_PACKAGES_DIR ${WORK}/installed)

macro(vcpkg_check_features)
  cmake_parse_arguments(F "" "OUT_FEATURE_OPTIONS" "FEATURES" ${ARGN})
  set(${F_OUT_FEATURE_OPTIONS} "")
  while(F_FEATURES)
    list(POP_FRONT F_FEATURES feature option)
    if(feature IN_LIST FEATURES)
      list(APPEND ${F_OUT_FEATURE_OPTIONS} -D${option}=ON)
    else()
      list(APPEND ${F_OUT_FEATURE_OPTIONS} -D${option}=OFF)
    endif()
  endwhile()
endmacro()

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
endfunction()

function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 C "" "SOURCE_PATH" "OPTIONS")
  string(COMPARE EQUAL "${VCPKG_LIBRARY_LINKAGE}" dynamic shared)
  run(${CMAKE_COMMAND} -S ${C_SOURCE_PATH} -B ${CURRENT_BUILDTREES_DIR} -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=${shared}
      -DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR} -DCMAKE_INSTALL_LIBDIR=lib $ENV{LLA_CMAKE_OPTIONS} ${C_OPTIONS})
endfunction()

function(vcpkg_cmake_install)
  run(${CMAKE_COMMAND} --build ${CURRENT_BUILDTREES_DIR} --target install)
endfunction()

function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(PARSE_ARGV 0 C "" "CONFIG_PATH" "")
  file(MAKE_DIRECTORY ${CURRENT_PACKAGES_DIR}/share)
  file(RENAME ${CURRENT_PACKAGES_DIR}/${C_CONFIG_PATH} ${CURRENT_PACKAGES_DIR}/share/lla)
  file(GLOB_RECURSE left ${CURRENT_PACKAGES_DIR}/lib/cmake/*)
  if(left)
    message(FATAL_ERROR "files outside ${C_CONFIG_PATH}: ${left}")
  endif()
  # One folder up less: lib/cmake/lla became share/lla.
  file(READ ${CURRENT_PACKAGES_DIR}/share/lla/llaTargets.cmake text)
  string(REPLACE "get_filename_component(_IMPORT_PREFIX \"\${_IMPORT_PREFIX}\" PATH)\nget_filename_component(_IMPORT_PREFIX \"\${_IMPORT_PREFIX}\" PATH)\n"
                 "get_filename_component(_IMPORT_PREFIX \"\${_IMPORT_PREFIX}\" PATH)\n" text "${text}")
  file(WRITE ${CURRENT_PACKAGES_DIR}/share/lla/llaTargets.cmake "${text}")
  file(READ ${CURRENT_PACKAGES_DIR}/share/lla/llaConfig.cmake text)
  string(REPLACE "/../../../" "/../../" text "${text}")
  file(WRITE ${CURRENT_PACKAGES_DIR}/share/lla/llaConfig.cmake "${text}")
endfunction()

function(vcpkg_fixup_pkgconfig)
  file(STRINGS ${CURRENT_PACKAGES_DIR}/lib/pkgconfig/lla.pc prefix REGEX "^prefix=")
  if(NOT prefix STREQUAL "prefix=\${pcfiledir}/../..")
    message(FATAL_ERROR "lla.pc does not find its prefix itself: ${prefix}")
  endif()
endfunction()

function(vcpkg_copy_tools)
  cmake_parse_arguments(PARSE_ARGV 0 C "AUTO_CLEAN" "" "TOOL_NAMES")
  file(MAKE_DIRECTORY ${CURRENT_PACKAGES_DIR}/tools/lla)
  foreach(tool IN LISTS C_TOOL_NAMES)
    file(RENAME ${CURRENT_PACKAGES_DIR}/bin/${tool} ${CURRENT_PACKAGES_DIR}/tools/lla/${tool})
  endforeach()
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 C "" "" "FILE_LIST")
  configure_file(${C_FILE_LIST} ${CURRENT_PACKAGES_DIR}/share/lla/copyright COPYONLY)
endfunction()

include(${PORT}/portfile.cmake)
# What vcpkg's own check after a build would complain about.
file(GLOB bin ${CURRENT_PACKAGES_DIR}/bin/*)
if(bin OR EXISTS ${CURRENT_PACKAGES_DIR}/debug/include OR NOT EXISTS ${CURRENT_PACKAGES_DIR}/share/lla/copyright
   OR NOT EXISTS ${CURRENT_PACKAGES_DIR}/include/lla/lla.h)
  message(FATAL_ERROR "the port leaves what vcpkg refuses")
endif()
