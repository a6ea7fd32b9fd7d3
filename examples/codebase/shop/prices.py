"""Prices are whole cents, so that sums are exact."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Price:
    cents: int

    def __add__(self, other: "Price") -> "Price":
        return Price(self.cents + other.cents)

    def times(self, count: int) -> "Price":
        if count < 0:
            raise ValueError(f"count is {count}; a price is multiplied by 0 or more")
        return Price(self.cents * count)

    def __str__(self) -> str:
        return f"{self.cents // 100}.{self.cents % 100:02} €"
