"""PTX, what Triton compiles kernels to for GPUs of NVIDIA, run on the CPU: slowly, each access checked.

This shows what compiled code computes where there is no GPU. It knows the instructions that are met here, and
fails at any other one. The threads of a block run in step, so that a branch which only some of them take is
an error, and a barrier that is missing is not seen. Instructions: https://docs.nvidia.com/cuda/parallel-thread-execution
"""

import ctypes
import re

import numpy as np

WARP = 32
ALL = 0xFFFFFFFFFFFFFFFF


class Kernel:
    """The one kernel of a text of PTX."""

    def __init__(self, text):
        text = re.sub(r"//.*", "", text)
        head, body = text[text.index(".entry") :].split("{", 1)
        self.threads = int(re.search(r"\.reqntid (\d+)", text)[1])
        self.parameters = re.findall(r"\w+_param_\d+", head)
        self.labels, self.instructions = {}, []
        for line in body[: body.index("\n}")].splitlines():
            line = line.strip("{} \t")
            if label := re.match(r"(\$\w+):\s*", line):
                self.labels[label[1]] = len(self.instructions)
                line = line[label.end() :]
            statements = [part.strip() for part in line.split(";")]
            self.instructions += [_parsed(part) for part in statements if part and part[0] != "."]

    def run(self, blocks, arguments, tensors):
        """Run so many blocks of threads; tensors are passed by address, and only those given are touched."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        memory = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        for block in range(blocks):
            _Block(self, block, arguments, memory).run()


class _Block:
    """Threads that run in step; a register is an array of uint64, one number for each thread."""

    def __init__(self, kernel, number, arguments, memory):
        self.kernel, self.memory = kernel, memory
        self.arguments = dict(zip(kernel.parameters, arguments, strict=False))  # Triton adds some
        self.shared = bytearray(1 << 16)
        self.thread = np.arange(kernel.threads, dtype=np.uint64)
        self.registers = {"%tid.x": self.thread, "%ctaid.x": np.full_like(self.thread, number)}
        self.place = 0

    def run(self):
        while self.place < len(self.kernel.instructions):
            guard, name, operands = self.kernel.instructions[self.place]
            self.place += 1
            active = np.ones(len(self.thread), bool)
            if guard is not None:
                active = self.value(guard.lstrip("!")).astype(bool) ^ guard.startswith("!")
            if name == "ret":
                return
            if name.startswith("bra"):
                assert active.all() or not active.any(), "some threads branch, and others do not"
                self.place = self.kernel.labels[operands[0]] if active.all() else self.place
            elif name.startswith(("ld.global", "ld.shared")):
                self.load(name, operands, active)
            elif name.startswith("st."):
                self.store(name, operands, active)
            elif not name.startswith("bar.sync"):  # threads that are in step need not wait
                result = self.result(name.split("."), operands)
                targets = _listed(operands[0].partition("|")[0])
                for target, value in zip(targets, result if len(targets) > 1 else [result], strict=True):
                    before = self.registers.get(target, value)
                    self.registers[target] = np.where(active, value, before).astype(np.uint64)

    def value(self, operand):
        if operand in self.registers:
            return self.registers[operand]
        assert not operand.startswith("%"), f"{operand} is read before it is written"
        number = 0 if operand == "global_smem" else int(operand, 0)  # shared memory begins at 0
        return np.full(len(self.thread), number & ALL, np.uint64)

    def addresses(self, operand):
        base, _, offset = operand.strip("[] ").partition("+")
        return (self.value(base.strip()) + np.uint64(int(offset or "0") & ALL)).tolist()

    def load(self, name, operands, active):
        size, registers = _bits(name) // 8, _listed(operands[0])
        addresses = self.addresses(operands[1])
        found = [self.registers.get(register, np.zeros_like(self.thread)).copy() for register in registers]
        for thread in np.flatnonzero(active):
            data = self.memory_at(name, addresses[thread], size * len(registers))
            for place, values in enumerate(found):
                values[thread] = int.from_bytes(data[place * size : (place + 1) * size], "little")
        self.registers.update(zip(registers, found, strict=True))

    def store(self, name, operands, active):
        size, registers = _bits(name) // 8, _listed(operands[1])
        addresses = self.addresses(operands[0])
        rows = np.stack([self.value(register) for register in registers], axis=1).tolist()
        for thread in np.flatnonzero(active):
            data = b"".join((n & (1 << 8 * size) - 1).to_bytes(size, "little") for n in rows[thread])
            self.memory_at(name, addresses[thread], len(data))[:] = data

    def memory_at(self, name, at, size):
        assert at % size == 0, f"{name} at an address that is no multiple of {size}"
        if ".shared" in name:
            return memoryview(self.shared)[at : at + size]
        assert any(begin <= at and at + size <= end for begin, end in self.memory), "outside of all tensors"
        return memoryview((ctypes.c_ubyte * size).from_address(at)).cast("B")

    def result(self, name, operands):
        """What an instruction that only computes leaves in its target."""
        kind, bits = name[0], _bits(name[-1])
        if kind == "ld":  # a parameter
            number = _extended(self.arguments[operands[1].strip("[]")], name[-1])
            return np.full_like(self.thread, number & ALL)
        if kind == "mov" and operands[0].startswith("{"):
            both, half = self.value(operands[1]), np.uint64(bits // 2)
            return both & np.uint64((1 << bits // 2) - 1), both >> half
        if kind == "mov" and operands[1].startswith("{"):
            low, high = map(self.value, _listed(operands[1]))
            return low | high << np.uint64(bits // 2)
        if kind == "selp":
            return np.where(self.value(operands[3]).astype(bool), *map(self.value, operands[1:3]))
        if kind == "shfl":
            lanes = self.thread % WARP
            there = {"bfly": lanes ^ self.value(operands[2]), "idx": self.value(operands[2]) % WARP}[name[2]]
            return self.value(operands[1])[(self.thread - lanes + there).astype(np.int64)]
        values = [[_extended(n, name[-1]) for n in self.value(text).tolist()] for text in operands[1:]]
        if kind in ("mul", "mad"):
            products = [one * other for one, other in zip(*values[:2], strict=True)]
            added = self.value(operands[3]).tolist() if kind == "mad" else [0] * len(products)
            shift, bits = bits if name[1] == "hi" else 0, 64 if name[1] == "wide" else bits
            results = [(product >> shift) + more for product, more in zip(products, added, strict=True)]
        elif kind == "cvt":
            results, bits = values[0], _bits(name[-2])
        elif kind == "bfe":
            cut = [number >> place & (1 << count) - 1 for number, place, count in zip(*values, strict=True)]
            results = [_extended(n, f"{name[-1][0]}{count}") for n, count in zip(cut, values[2], strict=True)]
        else:
            compute = _COMPARED[name[1]] if kind == "setp" else _COMPUTED[kind]
            results = [compute(*numbers) for numbers in zip(*values, strict=True)]
        return np.array([int(number) & (1 << bits) - 1 for number in results], np.uint64)


def _quotient(one, other):
    return abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1) if other else 0


_COMPUTED = {
    "add": lambda one, other: one + other,
    "sub": lambda one, other: one - other,
    "and": lambda one, other: one & other,
    "or": lambda one, other: one | other,
    "xor": lambda one, other: one ^ other,
    "not": lambda one: ~one,
    "min": min,
    "max": max,
    "mov": lambda one: one,
    "shl": lambda one, count: one << min(count, 64),
    "shr": lambda one, count: one >> min(count, 64),
    "div": _quotient,
    "rem": lambda one, other: one - other * _quotient(one, other),
}
_COMPARED = {
    "lt": lambda one, other: one < other,
    "le": lambda one, other: one <= other,
    "gt": lambda one, other: one > other,
    "ge": lambda one, other: one >= other,
    "eq": lambda one, other: one == other,
    "ne": lambda one, other: one != other,
}


def _parsed(statement):
    """The register that guards an instruction, its name, and its operands."""
    guard = re.match(r"@(!?%\w+)\s+", statement)
    name, _, rest = statement[guard.end() if guard else 0 :].replace("\t", " ").partition(" ")
    operands = [operand.strip() for operand in re.findall(r"(?:\{[^}]*\}|[^,{])+", rest)]
    return guard[1] if guard else None, name, operands


def _listed(operand):
    return [text.strip() for text in operand.strip("{}").split(",")]


def _bits(name):
    found = re.search(r"(\d+)$", name)
    return int(found[1]) if found else 1  # of a predicate


def _extended(number, kind):
    """A number of the type at the end of an instruction's name, such as u32."""
    bits = _bits(kind)
    number &= (1 << bits) - 1
    return number - (1 << bits) if kind.startswith("s") and number >> bits - 1 else number
