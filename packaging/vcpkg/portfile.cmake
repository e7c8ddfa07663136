# SPDX-License-Identifier: Apache-2.0
# An overlay port: it builds the source tree that it stands in (vcpkg install lla --overlay-ports=packaging). A copy of it outside
# the tree takes the tree's place from LLA_SOURCE_DIR in the triplet.
if(NOT DEFINED LLA_SOURCE_DIR)
  set(LLA_SOURCE_DIR "${CMAKE_CURRENT_LIST_DIR}/../..")
endif()
get_filename_component(SOURCE_PATH "${LLA_SOURCE_DIR}" ABSOLUTE)

vcpkg_check_features(OUT_FEATURE_OPTIONS FEATURE_OPTIONS FEATURES cuda LLA_BUILD_CUDA tools LLA_BUILD_TOOLS)
# lla makes a shared library always and a static one on demand; a static triplet keeps the latter alone.
if(VCPKG_LIBRARY_LINKAGE STREQUAL "static")
  list(APPEND FEATURE_OPTIONS -DBUILD_SHARED_LIBS=OFF -DLLA_BUILD_STATIC=ON)
else()
  list(APPEND FEATURE_OPTIONS -DBUILD_SHARED_LIBS=ON -DLLA_BUILD_STATIC=OFF)
endif()

vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}" OPTIONS ${FEATURE_OPTIONS} -DLLA_BUILD_TESTS=OFF -DLLA_BUILD_DOCS=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/lla)
vcpkg_fixup_pkgconfig()
if("tools" IN_LIST FEATURES)
  vcpkg_copy_tools(TOOL_NAMES lm lla-conformance lla-bench AUTO_CLEAN)
endif()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share" "${CURRENT_PACKAGES_DIR}/share/doc"
     "${CURRENT_PACKAGES_DIR}/share/man")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
