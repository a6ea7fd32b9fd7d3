"""A basket: items, counts, and what they cost together."""

from shop.prices import Price
from shop.stock import Stock


class Basket:
    def __init__(self, prices: dict[str, Price], stock: Stock) -> None:
        self._prices, self._stock = prices, stock
        self._items: dict[str, int] = {}

    def add(self, item: str, count: int = 1) -> None:
        if item not in self._prices:
            raise KeyError(f"{item} is not sold here")
        self._stock.reserve(item, count)
        self._items[item] = self._items.get(item, 0) + count

    def total(self) -> Price:
        return sum((self._prices[item].times(count) for item, count in self._items.items()), Price(0))
