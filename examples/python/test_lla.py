# SPDX-License-Identifier: Apache-2.0
"""Trains a small model on the text "hello ", lets it continue from a state that is forked, saved and loaded, and tests errors.
Run it: python3 test_lla.py"""
import math
import os
import tempfile
import unittest

import numpy as np

import lla

ALPHABET, PERIOD = "helo ", "hello "
HEADS, DIM, ROWS, STEPS = 2, 8, 192, 150
LEVELS = lla.levels_needed(1024)


class Model:
    """Tables give each token its q, k, v and lam; a mixer looks back; a matrix turns its output into scores of the next token."""

    def __init__(self, context):
        random = np.random.default_rng(1)
        self.layer = context.layer(kind=lla.MIXER, mixer=lla.SCALAR_GATE, heads=HEADS, key_dim=DIM, value_dim=DIM,
                                   lambda_form=lla.LAMBDA_READY, levels=LEVELS)
        self.tables = {name: random.normal(0, 0.5, (len(ALPHABET), HEADS, width)).astype(np.float32)
                       for name, width in (("q", DIM), ("k", DIM), ("v", DIM), ("lam", LEVELS))}
        self.tables["lam"][:] = 1
        self.head = random.normal(0, 0.3, (len(ALPHABET), HEADS * DIM)).astype(np.float32)

    def inputs(self, tokens):
        rows = {name: table[tokens] for name, table in self.tables.items()}
        return rows | {"gate": np.full((len(tokens), HEADS), -0.1, np.float32)}

    def scores(self, y):
        return y.reshape(len(y), -1) @ self.head.T

    def step(self, batch, tokens, targets, rate):
        """One step down the gradient; returns the loss before it."""
        inputs = self.inputs(tokens)
        y = self.layer.forward(batch, **inputs)["y"]
        scores = self.scores(y)
        probabilities = np.exp(scores - scores.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)
        rows = np.arange(len(tokens))
        loss = -np.log(probabilities[rows, targets]).mean()
        probabilities[rows, targets] -= 1
        probabilities /= len(tokens)
        gradients = self.layer.backward(batch, {"y": (probabilities @ self.head).reshape(y.shape)}, tuple(self.tables), **inputs)
        self.head -= rate * probabilities.T @ y.reshape(len(y), -1)
        for name, table in self.tables.items():
            np.subtract.at(table, tokens, rate * gradients[name])
        return loss


def tokens_of(count, start=0):
    return np.array([ALPHABET.index(PERIOD[(start + i) % len(PERIOD)]) for i in range(count)])


class Foreign:
    """A tensor of another library, of which nothing is known but DLPack; its rows lie two apart."""

    def __init__(self, array):
        self.array, self.asked = np.repeat(array, 2, axis=0)[::2], False

    def __dlpack__(self, stream=None):
        self.asked = True
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Story(unittest.TestCase):
    """Train, prefill, decode, fork, save, load."""

    @classmethod
    def setUpClass(cls):
        cls.context = lla.Context(threads=2)
        cls.model = Model(cls.context)
        batch = lla.Batch(cls.context, [ROWS])  # planned once: every step has the same rows
        tokens, targets = tokens_of(ROWS), tokens_of(ROWS, 1)
        cls.losses = [cls.model.step(batch, tokens, targets, 0.3) for _ in range(STEPS)]
        print(f"lla {lla.version}: loss {cls.losses[0]:.3f}, after {STEPS} steps {cls.losses[-1]:.3f}")

    def setUp(self):
        self.state = lla.State([self.model.layer], slots=4)

    def append(self, slot, tokens, state=None):
        """Appends tokens to a slot; returns the scores of what may follow each."""
        return self.model.scores((state or self.state).append(slot, **self.model.inputs(tokens))["y"])

    def decode(self, slot, scores, count, state=None):
        """Continues a slot by its likeliest tokens; returns text and scores."""
        text = ""
        for _ in range(count):
            token = int(scores[-1].argmax())
            text += ALPHABET[token]
            scores = self.append(slot, np.array([token]), state)
        return text, scores

    def test_loss_falls(self):
        self.assertLess(self.losses[-1], 0.1 * self.losses[0])

    def test_the_state_computes_what_training_did(self):
        tokens = tokens_of(ROWS)
        whole = self.model.scores(self.model.layer.forward(lla.Batch(self.context, [ROWS]), **self.model.inputs(tokens))["y"])
        pieces = np.concatenate([self.append(0, piece) for piece in np.split(tokens, [50, 90, 91])])
        np.testing.assert_allclose(pieces, whole, rtol=1e-4, atol=1e-4)

    def test_decodes_forks_saves_and_loads(self):
        scores = self.append(0, tokens_of(100))
        self.assertEqual(self.state.length(0), 100)
        self.state.fork(0, 1)
        image = self.state.save(0, tag=b"hello model")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "slot.lla")
            with open(path, "wb") as file:
                file.write(image)
            with open(path, "rb") as file:
                image = file.read()
        other = lla.State([self.model.layer], slots=1)
        other.load(0, image, tag=b"hello model")

        text, last = self.decode(0, scores, 30)
        self.assertEqual(text, "o hello hello hello hello hell")
        print(f'"...hell" goes on: "{text}"')
        for slot, state in ((1, self.state), (0, other)):
            text_again, last_again = self.decode(slot, scores, 30, state)
            self.assertEqual(text_again, text)
            self.assertTrue((last_again == last).all(), "the same bits")

    def test_draft_is_accepted_in_part(self):
        self.append(0, tokens_of(100))
        self.append(1, tokens_of(102))
        batch = lla.Batch(self.context, [5], state=self.state, slots=[0])
        draft = np.concatenate([tokens_of(2, 100), np.zeros(3, int)])  # three of five are wrong
        self.model.layer.forward(batch, **self.model.inputs(draft))
        batch.commit([2])
        self.assertEqual(self.state.save(0), self.state.save(1))

    def test_tensors_of_others_are_read_where_they_lie(self):
        inputs = self.model.inputs(tokens_of(20))
        y = self.model.layer.forward(lla.Batch(self.context, [20]), **inputs)["y"]
        foreign = {name: Foreign(array) for name, array in inputs.items()}
        state = lla.State([self.model.layer], slots=1)
        np.testing.assert_array_equal(state.append(0, **foreign)["y"], y)
        dy = np.ones_like(y)
        batch = lla.Batch(self.context, [20])
        gradients = self.model.layer.backward(batch, {"y": Foreign(dy)}, ("k", "lam"), **foreign)
        for name, wanted in self.model.layer.backward(batch, {"y": dy}, ("k", "lam"), **inputs).items():
            np.testing.assert_array_equal(gradients[name], wanted)
        self.assertTrue(all(tensor.asked for tensor in foreign.values()))

    def test_several_sequences_in_one_step(self):
        batch = lla.Batch(self.context, [70, 2, 40], state=self.state, slots=[2, -1, 3])
        tokens = np.concatenate([tokens_of(70), np.zeros(2, int), tokens_of(40)])
        y = self.model.layer.forward(batch, **self.model.inputs(tokens))["y"]
        batch.commit()
        self.assertTrue((y[70:72] == 0).all())
        self.append(0, tokens_of(70))
        self.assertEqual(self.state.save(0), self.state.save(2))


class Errors(unittest.TestCase):
    """Failures are exceptions that name what was wrong."""

    def setUp(self):
        self.context = lla.Context()
        self.layer = self.context.layer(kind=lla.MIXER, mixer=lla.SCALAR_GATE, heads=1, key_dim=4, value_dim=4)
        self.state = lla.State([self.layer], slots=2)
        self.rows = np.ones((3, 1, 4), np.float32)

    def refused(self, name, call, *arguments, **named):
        with self.assertRaises(lla.Error) as caught:
            call(*arguments, **named)
        self.assertEqual(caught.exception.name, name)
        return str(caught.exception)

    def test_statuses(self):
        self.assertIn("key_dim", self.refused("LLA_INVALID_ARGUMENT", self.context.layer, kind=lla.MIXER, mixer=1, heads=1))
        self.refused("LLA_MISSING_ROLE", self.state.append, 0, q=self.rows)
        self.refused("LLA_SHAPE_MISMATCH", self.state.append, 0, q=self.rows, k=self.rows[:, :, :3], v=self.rows)
        self.refused("LLA_INVALID_ARGUMENT", self.state.append, 2, q=self.rows, k=self.rows, v=self.rows)
        self.refused("LLA_INVALID_ARGUMENT", self.state.truncate, 0, 1)
        self.assertEqual(self.state.length(0), 0)

    def test_images_from_outside(self):
        self.state.append(0, q=self.rows, k=self.rows, v=self.rows)
        image = self.state.save(0, tag=b"a")
        self.refused("LLA_STATE_INCOMPATIBLE", self.state.load, 1, image, tag=b"b")
        self.refused("LLA_DATA_CORRUPT", self.state.load, 1, image[:-1] + b"\0", tag=b"a")
        self.refused("LLA_DATA_CORRUPT", self.state.load, 1, b"", tag=b"a")

    def test_gradients_by_differences(self):
        random = np.random.default_rng(2)
        context = lla.Context(backend=lla.BACKEND_REFERENCE)
        layer = context.layer(kind=lla.MIXER, mixer=lla.DELTA_RULE, heads=2, groups=1, key_dim=3, value_dim=2,
                              write_form=lla.WRITE_READY)
        inputs = {"q": random.normal(size=(5, 1, 3)), "k": random.normal(size=(5, 1, 3)), "v": random.normal(size=(5, 2, 2)),
                  "gate": -random.random((5, 2)), "write": random.random((5, 2))}
        batch, dy = lla.Batch(context, [2, 3]), random.normal(size=(5, 2, 2))
        gradients = layer.backward(batch, {"y": dy}, tuple(inputs), **inputs)
        for name, array in inputs.items():
            step, values = 1e-6, []
            for sign in (1, -1):
                moved = array.copy()
                moved.flat[3] += sign * step
                values.append((layer.forward(batch, **{**inputs, name: moved})["y"] * dy).sum())
            difference = (values[0] - values[1]) / (2 * step)
            self.assertTrue(math.isclose(difference, gradients[name].flat[3], rel_tol=1e-5, abs_tol=1e-7), name)


if __name__ == "__main__":
    unittest.main()
