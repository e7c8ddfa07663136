// SPDX-License-Identifier: Apache-2.0
// The mixer and the parts of a cell as layers of their own: one step each.
#include "cells/cell.h"

namespace lla {
namespace {

MixerForward mixer_forward(const Builder& b, const Tensors& v) {
  MixerForward p;
  p.shape = b.layer.shape;
  p.batch = b.batch;
  p.q = v.view(LLA_Q);
  p.k = v.view(LLA_K);
  p.v = v.view(LLA_V);
  p.gate = v.view(LLA_GATE);
  p.write = v.view(LLA_WRITE);
  p.lambda = v.view(LLA_LAMBDA);
  p.y = v.view(LLA_Y);
  p.state = b.state;
  p.saved = b.mixer_saved_out();
  return p;
}

MixerBackward mixer_backward(const Builder& b, const CallTensors& call) {
  const Tensors& v = call.values;
  const Tensors& g = call.gradients;
  MixerBackward p;
  p.shape = b.layer.shape;
  p.batch = b.batch;
  p.q = v.view(LLA_Q);
  p.k = v.view(LLA_K);
  p.v = v.view(LLA_V);
  p.gate = v.view(LLA_GATE);
  p.write = v.view(LLA_WRITE);
  p.lambda = v.view(LLA_LAMBDA);
  p.dy = call.output_gradients.view(LLA_Y);
  p.dq = g.view(LLA_Q);
  p.dk = g.view(LLA_K);
  p.dv = g.view(LLA_V);
  p.dgate = g.view(LLA_GATE);
  p.dwrite = g.view(LLA_WRITE);
  p.dlambda = g.view(LLA_LAMBDA);
  p.state = b.state;
  p.gradient = b.gradient;
  p.saved = b.mixer_saved_in();
  return p;
}

Convolution convolution(const Builder& b, const CallTensors& call) {
  Convolution p;
  p.channels = b.d.hidden;
  p.width = b.d.conv_width;
  p.activation = b.d.conv_activation;
  p.batch = b.batch;
  p.x = call.values.view(LLA_X);
  p.y = call.values.view(LLA_Y);
  p.weight = call.values.weight(LLA_WEIGHT_CONV);
  p.bias = call.values.weight(LLA_WEIGHT_CONV_BIAS);
  p.state = b.state;
  p.dy = call.output_gradients.view(LLA_Y);
  p.dx = call.gradients.view(LLA_X);
  p.dweight = call.gradients.weight(LLA_WEIGHT_CONV);
  p.dbias = call.gradients.weight(LLA_WEIGHT_CONV_BIAS);
  p.gradient = b.gradient;
  return p;
}

Gates gates(const Builder& b, const CallTensors& call) {
  const Tensors& v = call.values;
  const Tensors& g = call.gradients;
  Gates p = gates_of(b);
  p.gate = v.view(LLA_GATE);
  p.write = v.view(LLA_WRITE);
  p.lambda = v.view(LLA_LAMBDA);
  p.dt_bias = v.weight(LLA_WEIGHT_DT_BIAS);
  p.a_log = v.weight(LLA_WEIGHT_A_LOG);
  p.lambda_weight = v.weight(LLA_WEIGHT_LAMBDA);
  p.gate_out = v.view(LLA_GATE_OUT);
  p.write_out = v.view(LLA_WRITE_OUT);
  p.lambda_out = v.view(LLA_LAMBDA_OUT);
  p.dgate_out = call.output_gradients.view(LLA_GATE_OUT);
  p.dwrite_out = call.output_gradients.view(LLA_WRITE_OUT);
  p.dlambda_out = call.output_gradients.view(LLA_LAMBDA_OUT);
  p.dgate = g.view(LLA_GATE);
  p.dwrite = g.view(LLA_WRITE);
  p.dlambda = g.view(LLA_LAMBDA);
  p.ddt_bias = g.weight(LLA_WEIGHT_DT_BIAS);
  p.da_log = g.weight(LLA_WEIGHT_A_LOG);
  p.dlambda_weight = g.weight(LLA_WEIGHT_LAMBDA);
  return p;
}

L2Norm l2_norm(const Builder& b, const CallTensors& call) {
  L2Norm p;
  p.heads = b.d.heads;
  p.dim = b.d.key_dim;
  p.epsilon = b.d.qk_norm_epsilon;
  p.scale = b.d.scale;
  p.batch = b.batch;
  p.x = call.values.view(LLA_X);
  p.y = call.values.view(LLA_Y);
  p.dy = call.output_gradients.view(LLA_Y);
  p.dx = call.gradients.view(LLA_X);
  return p;
}

GatedNorm gated_norm(const Builder& b, const CallTensors& call) {
  const Tensors& v = call.values;
  const Tensors& g = call.gradients;
  GatedNorm p = gated_norm_of(b, v.weight(LLA_WEIGHT_SKIP), v.skip_per_channel, v.weight(LLA_WEIGHT_NORM), v.norm_per_group);
  p.x = v.view(LLA_X);
  p.skip = v.view(LLA_SKIP_INPUT);
  p.z = v.view(LLA_Z);
  p.y = v.view(LLA_Y);
  p.dy = call.output_gradients.view(LLA_Y);
  p.dx = g.view(LLA_X);
  p.dskip = g.view(LLA_SKIP_INPUT);
  p.dz = g.view(LLA_Z);
  p.dd = g.weight(LLA_WEIGHT_SKIP);
  p.dweight = g.weight(LLA_WEIGHT_NORM);
  return p;
}

}  // namespace

void add_projection(Builder& b, const View& x, const View& y, const Matrix& weight, const Matrix& bias, int64_t inputs,
                    int64_t outputs) {
  Projection p;
  p.inputs = inputs;
  p.outputs = outputs;
  p.batch = b.batch;
  p.x = x;
  p.y = y;
  p.weight = weight;
  p.bias = bias;
  b.add(Op::ProjectionForward, p);
}

void add_projection_backward(Builder& b, const View& x, const View& dy, const Matrix& weight, const View& dx,
                             const Matrix& dweight, const Matrix& dbias, int64_t inputs, int64_t outputs,
                             bool dx_is_scratch) {
  Projection p;
  p.inputs = inputs;
  p.outputs = outputs;
  p.batch = b.batch;
  p.x = x;
  p.dy = dy;
  p.weight = weight;
  p.dx = dx;
  p.dweight = dweight;
  p.dbias = dbias;
  p.dx_is_scratch = dx_is_scratch;
  b.add(Op::ProjectionBackward, p);
}

void add_part_forward(Builder& b, const CallTensors& call) {
  const Tensors& v = call.values;
  switch (b.d.kind) {
    case LLA_LAYER_MIXER:
      b.add(Op::MixerForward, mixer_forward(b, v));
      break;
    case LLA_LAYER_CONVOLUTION:
      b.add(Op::ConvolutionForward, convolution(b, call));
      break;
    case LLA_LAYER_GATES:
      b.add(Op::GatesForward, gates(b, call));
      break;
    case LLA_LAYER_L2_NORM:
      b.add(Op::L2NormForward, l2_norm(b, call));
      break;
    case LLA_LAYER_GATED_NORM:
      b.add(Op::GatedNormForward, gated_norm(b, call));
      break;
    default:  // LLA_LAYER_PROJECTION
      add_projection(b, v.view(LLA_X), v.view(LLA_Y), v.weight(LLA_WEIGHT_PROJ), v.weight(LLA_WEIGHT_PROJ_BIAS), b.d.hidden,
                     b.d.outputs);
  }
}

void add_part_backward(Builder& b, const CallTensors& call) {
  const Tensors& v = call.values;
  const Tensors& g = call.gradients;
  switch (b.d.kind) {
    case LLA_LAYER_MIXER:
      b.add(Op::MixerBackward, mixer_backward(b, call));
      break;
    case LLA_LAYER_CONVOLUTION:
      b.add(Op::ConvolutionBackward, convolution(b, call));
      break;
    case LLA_LAYER_GATES:
      b.add(Op::GatesBackward, gates(b, call));
      break;
    case LLA_LAYER_L2_NORM:
      b.add(Op::L2NormBackward, l2_norm(b, call));
      break;
    case LLA_LAYER_GATED_NORM:
      b.add(Op::GatedNormBackward, gated_norm(b, call));
      break;
    default:  // LLA_LAYER_PROJECTION
      add_projection_backward(b, v.view(LLA_X), call.output_gradients.view(LLA_Y), v.weight(LLA_WEIGHT_PROJ), g.view(LLA_X),
                              g.weight(LLA_WEIGHT_PROJ), g.weight(LLA_WEIGHT_PROJ_BIAS), b.d.hidden, b.d.outputs);
  }
}

}  // namespace lla
