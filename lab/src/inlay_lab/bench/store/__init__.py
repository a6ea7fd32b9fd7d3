"""First tokens behind a module that a store on disk has, beside what reading its bytes costs in other ways."""
