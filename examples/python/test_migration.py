# SPDX-License-Identifier: Apache-2.0
"""What docs/migration.md says about the arguments of other libraries, against loops over the formulas that those document.
Run it: python3 test_migration.py"""
import unittest

import numpy as np

import lla

T, H, G, K, V = 70, 4, 2, 8, 6  # rows, value heads, groups, key and value dimensions
SILU = lambda x: x / (1 + np.exp(-x))
SOFTPLUS = lambda x: np.logaddexp(0, x)


def scan(q, k, v, g, write, state, delta=False, scale=1.0):
    """o_t = scale q_t S_t with S_t = exp(g_t) S_{t-1} + w_t k_t (v_t - [delta] exp(g_t) k_t S_{t-1})^T, each head by itself;
    q, k [T, G, K]. Returns the outputs and the last state [H, K, V]."""
    q, k = (np.repeat(x, H // x.shape[1], 1) for x in (q, k))
    outputs, state = np.empty(v.shape), state.astype(float).copy()
    for t in range(len(v)):
        state *= np.exp(g[t])[:, None, None]
        value = v[t] - np.einsum("hk,hkv->hv", k[t], state) if delta else v[t]
        state += np.einsum("h,hk,hv->hkv", write[t], k[t], value)
        outputs[t] = scale * np.einsum("hk,hkv->hv", q[t], state)
    return outputs, state


class Migration(unittest.TestCase):
    def setUp(self):
        random = np.random.default_rng(7)
        draw = lambda *shape: random.normal(0, 0.5, shape).astype(np.float32)
        self.q, self.k, self.v, self.z = draw(T, G, K), draw(T, G, K), draw(T, H, V), draw(T, H, V)
        self.raw, self.a_log, self.dt_bias, self.d = draw(T, H), draw(H), draw(H), draw(H)
        self.beta, self.state = 1 / (1 + np.exp(-draw(T, H))), draw(H, K, V)
        self.context = lla.Context()

    def close(self, got, expected):
        self.assertLess(np.abs(got - expected.reshape(got.shape)).max(), 2e-5 * max(1, np.abs(expected).max()))

    def run_with_state(self, layer, position, matrix, **inputs):
        """Outputs of all rows after an imported state, and the state after them: the nodes of a linear layer and its tail."""
        state = lla.State([layer], slots=1)
        state.import_linear(0, position, matrix)
        outputs = state.append(0, **inputs)["y"]
        self.assertEqual(state.length(0), position + T)
        return outputs

    def test_mamba_chunk_scan_combined(self):
        """x, dt, A, B, C, D, z, dt_bias, dt_softplus=True, dt_limit, initial_states: a cell."""
        low, high = 0.4, 1.5
        layer = self.context.layer(kind=lla.CELL, mixer=lla.SCALAR_GATE, heads=H, groups=G, key_dim=K, value_dim=V,
                                   gate_form=lla.GATE_SOFTPLUS, write_form=lla.WRITE_STEP, dt_min=low, dt_max=high)
        step = np.clip(SOFTPLUS(self.raw + self.dt_bias), low, high)
        gate = -np.exp(self.a_log) * step
        expected, _ = scan(self.q, self.k, self.v, gate, step, self.state)
        expected = (expected + self.d[:, None] * self.v) * SILU(self.z)
        got = self.run_with_state(layer, 0, self.state, q=self.q, k=self.k, v=self.v, gate=self.raw,
                                  z=self.z.reshape(T, H * V), dt_bias=self.dt_bias, a_log=self.a_log, skip=self.d)
        self.close(got, expected)

    def test_selective_state_update(self):
        """dt that is ready: a mixer with gate = dt * A and write = dt; the state is [heads, dim, dstate] there."""
        layer = self.context.layer(kind=lla.MIXER, mixer=lla.SCALAR_GATE, heads=H, groups=G, key_dim=K, value_dim=V,
                                   write_form=lla.WRITE_READY)
        theirs = np.ascontiguousarray(self.state.transpose(0, 2, 1))  # [H, V, K]
        step = SOFTPLUS(self.raw).astype(np.float32)
        gate = (-np.exp(self.a_log) * step).astype(np.float32)
        expected, last = scan(self.q, self.k, self.v, gate, step, theirs.transpose(0, 2, 1))
        state = lla.State([layer], slots=1)
        state.import_linear(0, 5, theirs.transpose(0, 2, 1))  # strides are taken as they are
        got = np.concatenate([state.append(0, q=self.q[t:t + 1], k=self.k[t:t + 1], v=self.v[t:t + 1], gate=gate[t:t + 1],
                                           write=step[t:t + 1])["y"] for t in range(T)])
        self.close(got, expected)
        # What the matrix of the other library is after T rows: the node and the rows of the tail, added up.
        matrix = state.read(0, lla.PART_ABSORBED, (H, K, V))
        rows = state.length(0) % 64
        tail = [state.read(0, part, shape) for part, shape in ((lla.PART_TAIL_K, (rows, G, K)), (lla.PART_TAIL_V, (rows, H, V)),
                                                              (lla.PART_TAIL_GATE, (rows, H)), (lla.PART_TAIL_WRITE, (rows, H)))]
        self.close(scan(tail[0], *tail, matrix)[1].astype(np.float32), last)

    def test_chunk_gated_delta_rule(self):
        """scale, use_qk_l2norm_in_kernel, beta, initial_state: a cell without convolution."""
        layer = self.context.layer(kind=lla.CELL, mixer=lla.DELTA_RULE, heads=H, groups=G, key_dim=K, value_dim=V,
                                   write_form=lla.WRITE_READY, qk_norm=1, scale=K ** -0.5)
        norm = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
        gate = -SOFTPLUS(self.raw)
        expected, _ = scan(norm(self.q), norm(self.k), self.v, gate, self.beta, self.state, delta=True, scale=K ** -0.5)
        got = self.run_with_state(layer, 64, self.state, q=self.q, k=self.k, v=self.v, gate=gate.astype(np.float32),
                                  write=self.beta.astype(np.float32))
        self.close(got, expected)

    def test_chunk_log_linear_attn(self):
        """q, k, v, g, level_scales: a mixer with lambda, level by the bit length of t xor s."""
        levels = lla.levels_needed(T)
        layer = self.context.layer(kind=lla.MIXER, mixer=lla.SCALAR_GATE, heads=H, groups=1, key_dim=K, value_dim=V,
                                   lambda_form=lla.LAMBDA_READY, levels=levels)
        scales = np.random.default_rng(8).normal(0, 1, (T, H, levels)).astype(np.float32)
        gate = (-SOFTPLUS(self.raw)).astype(np.float32)
        q, k = self.q[:, :1], self.k[:, :1]
        expected = np.zeros((T, H, V))
        for t in range(T):
            for s in range(t + 1):
                weight = scales[t, :, (t ^ s).bit_length()] * np.exp(gate[s + 1:t + 1].sum(0)) * (q[t, 0] @ k[s, 0])
                expected[t] += weight[:, None] * self.v[s]
        got = layer.forward(lla.Batch(self.context, [T]), q=q, k=k, v=self.v, gate=gate, lam=scales)["y"]
        self.close(got, expected)


if __name__ == "__main__":
    unittest.main()
