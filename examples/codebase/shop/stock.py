"""What is in stock, and what has been reserved of it."""


class OutOfStockError(Exception):
    pass


class Stock:
    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = dict(counts)
        self._reserved: dict[str, int] = {}

    def free(self, item: str) -> int:
        return self._counts.get(item, 0) - self._reserved.get(item, 0)

    def reserve(self, item: str, count: int) -> None:
        if count > self.free(item):
            raise OutOfStockError(f"{item}: {count} wanted, {self.free(item)} free")
        self._reserved[item] = self._reserved.get(item, 0) + count

    def ship(self, item: str, count: int) -> None:
        self._reserved[item] -= count
        self._counts[item] -= count
