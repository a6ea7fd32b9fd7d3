"""Orders go from 'new' to 'paid' to 'shipped', and never back."""

from enum import Enum

from shop.basket import Basket


class State(Enum):
    NEW = "new"
    PAID = "paid"
    SHIPPED = "shipped"


class Order:
    def __init__(self, basket: Basket) -> None:
        self.basket, self.state = basket, State.NEW

    def pay(self) -> None:
        if self.state is not State.NEW:
            raise ValueError(f"the order is {self.state.value} already")
        self.state = State.PAID

    def ship(self) -> None:
        if self.state is not State.PAID:
            raise ValueError(f"the order is {self.state.value}; only paid orders are shipped")
        self.state = State.SHIPPED
