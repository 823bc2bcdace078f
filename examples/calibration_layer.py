"""A calibration table inside a network, and training through it. Run `python examples/calibration_layer.py`.

A thermistor is read by an amplifier whose gain and offset are unknown. Its data sheet has a table of resistance and
temperature. The model has an affine map of the readings (the amplifier), the table, and a head that predicts the power
of a heater from the temperatures of four such sensors. Only powers are observed. Gradients flow through the table, so
training finds the amplifier although no temperature was ever measured. The table keeps its proven error.

Then the values of the table are trained as well, from a sensor that has aged. The certificate ends once they move.
`recertify` proves the error at the points of the aged sensor.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import attnc.nn

GAIN, OFFSET = 1.4, -0.3
"""The amplifier that training has to find: the logarithm of the resistance is GAIN·reading + OFFSET."""


def data_sheet(points: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of resistances, relative to that at 25 °C, and temperatures in units of 100 °C: the beta formula."""
    log_resistance = np.linspace(-3, 2, points)
    return log_resistance, (1 / (1 / 298.15 + log_resistance / 3950) - 273.15) / 100


class Heater(nn.Module):
    """Readings (batch, 4) → power (batch, 1)."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.0))
        self.table = table
        self.power = nn.Sequential(nn.Linear(4, 16), attnc.nn.Activation("silu"), nn.Linear(16, 1))

    def temperatures(self, readings: Tensor) -> Tensor:
        return self.table(self.gain * readings + self.offset)

    def forward(self, readings: Tensor) -> Tensor:
        return self.power(self.temperatures(readings))


def observed(count: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Readings, the powers that belong to them, and the true temperatures, which training never sees."""
    readings = torch.rand(count, 4, generator=torch.Generator().manual_seed(0)) * 2.5 - 1.5
    temperatures = (1 / (1 / 298.15 + (GAIN * readings + OFFSET) / 3950) - 273.15) / 100
    return readings, 2 * (0.6 - temperatures).mean(dim=1, keepdim=True), temperatures


def calibrated(steps: int = 600) -> dict[str, float]:
    """Train the amplifier and the network through a fixed table."""
    torch.manual_seed(0)
    sheet = data_sheet()
    model = Heater(attnc.nn.Table(*sheet, 1e-4, dtype="float32"))
    # The network is given: a mean of four temperatures, which is linear. So the amplifier is all that can be wrong.
    model.power = nn.Sequential(nn.Linear(4, 1))
    with torch.no_grad():
        model.power[0].weight.fill_(-0.5)
        model.power[0].bias.fill_(1.2)
    model.power.requires_grad_(False)
    readings, power, temperatures = observed()
    optimiser = torch.optim.Adam([model.gain, model.offset], lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(readings), power)
        loss.backward()
        optimiser.step()
    error = float((model.temperatures(readings) - temperatures).abs().max().detach())
    bound = model.table.certificate.error
    assert bound is not None
    return {
        "gain": float(model.gain.detach()),
        "offset": float(model.offset.detach()),
        "largest error in °C": 100 * error,
        "error of the table in °C": 100 * bound,
    }


def end_to_end(steps: int = 300) -> tuple[float, float]:
    """Train the amplifier and a small network together. Return the mean squared error before and after."""
    torch.manual_seed(0)
    model, (readings, power, _) = Heater(attnc.nn.Table(*data_sheet(), 1e-4, dtype="float32")), observed()
    optimiser, losses = torch.optim.Adam(model.parameters(), lr=5e-3), []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(readings), power)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


def aged(steps: int = 200) -> dict[str, object]:
    """Train the values of the table itself: the sensor reads 3 % too cold, and 0.5 °C."""
    log_resistance, sheet = data_sheet()
    table = attnc.nn.Table(log_resistance, sheet, 1e-6, trainable=True)
    at, wanted = torch.tensor(log_resistance), torch.tensor(0.97 * sheet - 0.005)
    optimiser = torch.optim.Adam(table.parameters(), lr=2e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(table(at), wanted)
        loss.backward()
        optimiser.step()
    method = table.certificate.method
    trained = table.recertify(attnc.TableTarget(log_resistance, wanted.numpy()))
    return {"after training": method, "error at the new points in °C": 100 * (trained.bound or 0.0)}


def main() -> None:
    for name, found in calibrated().items():
        print(f"{name}: {found:.4g}")
    before, after = end_to_end()
    print(f"with a small network: mean squared error {before:.3g}, after training {after:.3g}")
    for name, value in aged().items():
        print(f"aged table, {name}: {value if isinstance(value, str) else f'{value:.3g}'}")


if __name__ == "__main__":
    main()
