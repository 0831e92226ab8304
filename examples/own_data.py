"""Your own data and a model for them: horovodrun -np 2 python own_data.py.

30 measurements of cell nuclei, benign or malignant, of 569 patients, come with scikit-learn. On two
CPU cores it takes 15 seconds, and reaches a top-1 of 95%.
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import Dataset, random_split

import hvd_train


class Patients(Dataset):
    classes = "malignant", "benign"  # optional: names for the reports

    def __init__(self):
        table = load_breast_cancer()
        measured = torch.tensor(table.data, dtype=torch.float32)
        self.measured, self.labels = (measured - measured.mean(0)) / measured.std(0), table.target

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        return self.measured[number], int(self.labels[number])


def data(config):  # two data sets: for training and for validation
    return random_split(Patients(), [0.8, 0.2], torch.Generator().manual_seed(0))


def model(num_classes):
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, num_classes))


defaults = {
    "recipe": "own-data",
    "epochs": 10,
    "batch_size": None,
    "global_batch_size": 32,
    "learning_rate": 0.05,
}
_, config = hvd_train.parse_args(workers=0, **defaults)
hvd_train.train(config, model=model, data=data)
